"""How the server and its processes end.

0    orderly
1    the engine did not live to the end of an orderly stop, or what did not stop in time was killed; of the command check:
     two runs that should be the same were not
2    wrong setting, busy port or unusable checkpoint; of the command batch: files that do not fit
65   the command batch has answered all lines, some with errors
70   a step failed or hung (engine), or a thread died; of the command check: the model or its server failed
71   too many crashes (supervisor)
74   stopped, but sessions could not be written; of the command batch: its answers could not be
75   the command batch was stopped before its end; the same command goes on
128  and more: a second signal, less 128, stopped the server at once
"""

EXIT_DIFFERENT = 1
EXIT_USAGE, EXIT_ERRORS, EXIT_ENGINE, EXIT_CRASHES, EXIT_LOST, EXIT_UNFINISHED = 2, 65, 70, 71, 74, 75
