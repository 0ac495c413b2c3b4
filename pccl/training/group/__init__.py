"""The group of peers that train together: joining, collectives that survive peer losses, and sites."""
