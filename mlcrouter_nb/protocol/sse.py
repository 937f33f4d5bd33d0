"""Server-sent events: cutting a byte stream into events, and writing them.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

BOM = b"\xef\xbb\xbf"
DONE = b"[DONE]"


class Splitter:
    """Feed it a body as it comes, cut anywhere; it answers the data of each event that is complete.

    Lines may end in LF, CR or CRLF and be of any length; comments and other fields are dropped; the data lines of one
    event are joined by LF. Bytes stay bytes, so UTF-8 may be cut anywhere too."""

    __slots__ = ("_cr", "_first", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # what no blank line has ended yet
        self._cr = False  # the last byte was CR: a LF that follows belongs to it
        self._first = True

    def feed(self, data: bytes) -> list[bytes]:
        """The events that these bytes complete."""
        if self._cr or b"\r" in data:
            data = self._with_lf_only(data)
        if b"\n" not in data:
            if data:
                self._parts.append(data)
            return []
        if self._parts:
            data = b"".join((*self._parts, data))
            self._parts.clear()
        whole, blank, rest = data.rpartition(b"\n\n")
        if rest:
            self._parts.append(rest)
        if not blank:
            return []
        events = []
        for block in whole.split(b"\n\n"):
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
            else:
                events.extend(self._event(block))
        self._first = False
        return events

    def _with_lf_only(self, data: bytes) -> bytes:
        if self._cr and data.startswith(b"\n"):
            data = data[1:]
            if not data:
                self._cr = False
                return data
        elif not data:
            return data
        self._cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _event(self, block: bytes) -> list[bytes]:
        """One event by the letter of the standard; an event without data is none."""
        if self._first:
            block = block.removeprefix(BOM)
        self._first = False
        values = []
        for line in block.split(b"\n"):
            field, colon, value = line.partition(b":")
            if field == b"data":
                values.append(value.removeprefix(b" ") if colon else b"")
        return [b"\n".join(values)] if values else []


def encode_event(data: bytes) -> bytes:
    """One event, as it goes over the wire; data of several lines becomes several `data:` lines."""
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    return b"data: %b\n\n" % data
