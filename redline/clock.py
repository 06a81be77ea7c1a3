"""The clocks of Redline: all of the package reads time and sleeps here, so that a test can set them.

Call these through the module (`clock.monotonic()`), since a test replaces the module's attributes. What reads time in a
loop of its own takes a clock as a parameter, whose default is one of these.
"""

import time

monotonic, monotonic_ns = time.monotonic, time.monotonic_ns
perf_counter, perf_counter_ns = time.perf_counter, time.perf_counter_ns
process_time, thread_time = time.process_time, time.thread_time
now, now_ns = time.time, time.time_ns  # since 1970
sleep = time.sleep
gmtime, strftime = time.gmtime, time.strftime
