"""The engine and the ops that run in it: queues, staged arrays, and the fast path of small ops."""
