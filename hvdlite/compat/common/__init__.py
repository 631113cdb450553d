"""``horovod.common`` holds the parts of Horovod that belong to no framework.

basics.py      ``HorovodBasics``, the functions of every framework's module as methods
elastic.py     names of elastic jobs, which raise when they are used
exceptions.py  exceptions under Horovod's names
util.py        small functions that other projects import
"""
