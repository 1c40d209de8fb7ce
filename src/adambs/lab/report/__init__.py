"""From the records of one run or of several to what people read.

``analysis`` makes numbers of them, ``phrases`` sentences, ``figures`` and ``tables`` what their names say.
``page`` writes report.html, ``summary`` and ``overview`` RESULTS.md, ``terminal`` what a command prints.
"""
