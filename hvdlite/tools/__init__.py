"""The command ``hvdlite``, and the commands that measure.

cli/     the command and its subcommands
advise/  which strategy a program should train with
doctor/  what is wrong with an installation, a program, or the links between hosts
"""
