"""Shared state: comparison and transfer.

tensor_blocks   a state as blocks and digests
schedule        the choice of donors for blocks
receiver        fetches from many donors, verifies, writes
transfer        a peer's part in one `sync_shared_state`, and the donor's side
"""
