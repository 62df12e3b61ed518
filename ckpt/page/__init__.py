"""The read-only web page of ``ckpt serve``: it shows runs, their steps on each tier, and restores.

The server renders the whole page, including the charts, so a browser loads nothing from the
internet. A background thread looks at the tiers at an interval. Requests for runs are answered from
its last view of them.
"""
