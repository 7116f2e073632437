"""Makes the kernel write checksums at once: a switch in user space is no device that would.

python checksums.py INTERFACE
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
_ETHTOOL_STXCSUM = 0x17


def main() -> None:
    command = array.array("B", struct.pack("II", _ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP", sys.argv[1].encode(), command.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


if __name__ == "__main__":
    main()
