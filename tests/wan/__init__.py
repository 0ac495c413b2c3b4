"""A wide area network on one machine: real kernel TCP between network namespaces, over links with delay, rate and loss.

    shape       what a lab is made of: `Link`, and what differs for a `Site` or a `Path`
    namespace   a network namespace that lives as long as a process of ours
    lab         `Lab`: hosts, what runs on them, links that are cut and mended
    relay       the network in user space, over TUN devices (relay.c)
    probe       one plain TCP stream between two hosts: what the link alone does
    __main__    `python -m tests.wan`: a command on every host of a lab

It needs root, as namespaces and devices do. All traffic stays inside the lab's namespaces.
"""
