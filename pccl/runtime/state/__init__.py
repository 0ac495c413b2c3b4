"""Shared state: what is compared, and how it moves from donors to a newcomer.

tensor_blocks       a state as blocks and digests
schedule            which block is asked of which donor
receiver            fetches from many donors, verifies, lands
donor               answers a receiver
transfer            a peer's part in one `sync_shared_state`, of all these
"""
