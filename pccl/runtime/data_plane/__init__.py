"""The engine and the ops that run in it.

What an op is, from its caller to the C library:

    op_spec             as its caller describes it
    pending             as its caller has it, from the launch to the result
    op_request          as the engine takes it
    dimensions          shapes of arrays as numbers, which peers compare
    op_description      as text, for errors

The way of an op, from the ground up:

    engine              the C library's engine: one thread
    events              what an engine reports
    engine_threads      several engines as one
    interfaces          what the parts here, and the session, ask of each other
    staged_ops          ops whose elements come piece by piece, with
        pieces              how an op is divided, and how peers tell
        marker_ops          what tells peers with whole ops of ops in pieces
        division            whole ops that go on in pieces
        mailbox             calls from the threads in which pieces come
    fast_path           small ops that their callers run past the trio thread
"""
