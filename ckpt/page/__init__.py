"""The read-only web page of ``ckpt serve``: it shows runs, their steps on each tier, and restores.

The server renders the whole page, including the charts, so a browser loads nothing from the
internet. A background thread lists the tiers at regular intervals, and pauses when there was no
request for a minute. Requests for runs are answered from the views that this thread has made last.
Requests for one step, or for the difference of two steps, also read manifests.
"""
