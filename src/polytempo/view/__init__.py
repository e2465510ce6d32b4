"""A web page on this machine that shows runs as they go. It reads their folders, and nothing else.

`tail.py` reads files as they grow, `folder.py` a run, `activity.py` its events; `shelf.py` finds
runs; `panels.py` says what the page is told, `app.py` tells it, and `page/` is the page. Needs the
extra `view`.
"""
