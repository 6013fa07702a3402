"""Bytes of packed codes, without torch, so that a plan can ask before anything is loaded."""


def code_bytes(numbers: int, bits: int) -> int:
    """Return the bytes of a row's codes: of 1, 2, 3, 4 or 8 bits each, 3 bits as two and one."""
    return code_bytes(numbers, 2) + code_bytes(numbers, 1) if bits == 3 else -(-numbers * bits // 8)
