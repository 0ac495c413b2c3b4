"""Ops, and the engine that runs them.

op_spec             an op as its caller describes it
pending             an op in flight, as its caller sees it
op_request          an op as the C library takes it
op_shape            what peers compare of an op, as numbers and as text
engine              the C library's engine, and ops whose input has to be staged first
events              what the engine reports
fast_path           small ops that their callers run without the trio thread
op_records          the engine's flight recorder
overlapped_waits    the time that callers spend in waits for handles
"""
