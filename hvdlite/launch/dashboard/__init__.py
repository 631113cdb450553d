"""A running job for people who look at it: ``hvdliterun --dashboard`` shows a page, and ``hvdlite top`` the same in a terminal.

board.py   what is known of the job: a table of the ranks, who waits for whom, the last warnings, failures and restarts
page.py    makes a page of it, and a text
server.py  gives both to who has the token, on the loopback interface only
top.py     finds a job of this user on this machine, and shows the text again and again

The numbers come with a small message of each rank once a second (`hvdlite.runtime.pulse`), over the connection that the ranks
have with hvdliterun anyway; nothing leaves the hosts of the job.
"""
