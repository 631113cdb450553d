"""This folder is put on PYTHONPATH, so that every Python process runs sitecustomize.py at its start."""
