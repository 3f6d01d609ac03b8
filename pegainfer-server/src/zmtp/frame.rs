//! Frames, and the commands of a handshake.

use std::io::{Error, ErrorKind, Result};

/// Flags of a frame.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Maximum size of a frame that a peer may send, in bytes: topics of subscriptions and small requests.
const MAX_FRAME: usize = 4096;
/// Bytes of a greeting.
pub(super) const GREETING: usize = 64;
/// Bytes of a greeting up to the version's major number.
const SIGNATURE: usize = 10;

/// A frame of a peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Part of a message; `more` is true if further parts follow.
    Message { more: bool, body: Vec<u8> },
    /// A command: its name and its data.
    Command { name: Vec<u8>, data: Vec<u8> },
}

pub(super) fn invalid(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}

impl Frame {
    /// Takes the first frame out of `buffer`; `None` if it is not complete.
    ///
    /// # Errors
    /// It is too long or malformed.
    pub fn take(buffer: &mut Vec<u8>) -> Result<Option<Self>> {
        let Some(&flags) = buffer.first() else { return Ok(None) };
        let header = if flags & LONG != 0 { 9 } else { 2 };
        let Some(size) = buffer.get(1..header) else { return Ok(None) };
        let size = size.iter().fold(0u64, |size, byte| size << 8 | u64::from(*byte));
        if size > MAX_FRAME as u64 || flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(invalid("a frame is too long or has unknown flags"));
        }
        let end = header + size as usize;
        if buffer.len() < end {
            return Ok(None);
        }
        let body = buffer.drain(..end).skip(header).collect::<Vec<u8>>();
        if flags & COMMAND == 0 {
            return Ok(Some(Self::Message { more: flags & MORE != 0, body }));
        }
        let (name, data) = split_name(&body).ok_or_else(|| invalid("a command has no name"))?;
        Ok(Some(Self::Command { name: name.to_vec(), data: data.to_vec() }))
    }
}

/// A text after the byte with its length, and what follows it.
fn split_name(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&length, rest) = bytes.split_first()?;
    rest.split_at_checked(length.into())
}

/// Appends the header of a frame of `size` bytes.
pub(super) fn put_header(out: &mut Vec<u8>, more: bool, size: usize) {
    put_flags(out, if more { MORE } else { 0 }, size);
}

fn put_flags(out: &mut Vec<u8>, flags: u8, size: usize) {
    match u8::try_from(size) {
        Ok(size) => out.extend([flags, size]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend((size as u64).to_be_bytes());
        }
    }
}

/// A command as a frame.
pub(super) fn command(name: &str, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(data.len() + name.len() + 10);
    put_flags(&mut out, COMMAND, 1 + name.len() + data.len());
    out.push(name.len() as u8);
    out.extend(name.as_bytes());
    out.extend(data);
    out
}

/// The READY command of a socket of this type.
pub(super) fn ready(socket_type: &str) -> Vec<u8> {
    const PROPERTY: &str = "Socket-Type";
    let mut data = vec![PROPERTY.len() as u8];
    data.extend(PROPERTY.as_bytes());
    data.extend((socket_type.len() as u32).to_be_bytes());
    data.extend(socket_type.as_bytes());
    command("READY", &data)
}

/// The socket type among the properties of a READY command.
pub(super) fn socket_type(mut properties: &[u8]) -> Result<Vec<u8>> {
    let malformed = || invalid("READY is malformed");
    while !properties.is_empty() {
        let (name, rest) = split_name(properties).ok_or_else(malformed)?;
        let (size, rest) = rest.split_first_chunk::<4>().ok_or_else(malformed)?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*size) as usize).ok_or_else(malformed)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Ok(value.to_vec());
        }
        properties = rest;
    }
    Err(invalid("READY has no socket type"))
}

/// The greeting of version 3.1 with the mechanism NULL.
pub(super) fn greeting() -> [u8; GREETING] {
    let mut greeting = [0; GREETING];
    (greeting[0], greeting[9]) = (0xff, 0x7f);
    (greeting[10], greeting[11]) = (3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// Minor version of a peer's greeting.
///
/// # Errors
/// It does not speak ZMTP 3 with the mechanism NULL.
pub(super) fn minor_version(greeting: &[u8; GREETING]) -> Result<u8> {
    let is_zmtp = greeting[0] == 0xff && greeting[9] & 1 == 1 && greeting[SIGNATURE] >= 3;
    if !is_zmtp {
        return Err(invalid("the peer does not speak ZMTP 3"));
    }
    if greeting[12..32] != *b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
        return Err(invalid("the peer wants another security mechanism than NULL"));
    }
    Ok(greeting[11])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_one_at_a_time() {
        let mut buffer = vec![1, 2, b'a', b'b', 0, 1, b'c'];
        buffer.extend(command("PING", &[0, 5, b'x']));
        assert_eq!(Frame::take(&mut buffer).unwrap(), Some(Frame::Message { more: true, body: b"ab".to_vec() }));
        assert_eq!(Frame::take(&mut buffer).unwrap(), Some(Frame::Message { more: false, body: b"c".to_vec() }));
        let ping = Frame::Command { name: b"PING".to_vec(), data: vec![0, 5, b'x'] };
        let last = buffer.pop().unwrap();
        assert_eq!(Frame::take(&mut buffer).unwrap(), None, "it is not complete");
        buffer.push(last);
        assert_eq!(Frame::take(&mut buffer).unwrap(), Some(ping));
        assert!(buffer.is_empty() && Frame::take(&mut buffer).unwrap().is_none());
    }

    #[test]
    fn long_frames_have_eight_bytes_of_size() {
        let mut buffer = Vec::new();
        put_header(&mut buffer, true, 300);
        assert_eq!(buffer, [3, 0, 0, 0, 0, 0, 0, 1, 44]);
        buffer.extend([7; 300]);
        assert_eq!(Frame::take(&mut buffer).unwrap(), Some(Frame::Message { more: true, body: vec![7; 300] }));
    }

    #[test]
    fn hostile_frames_are_errors() {
        for bytes in [
            &[2, 0, 0, 0, 0, 0, 0, 16, 1][..], // one byte too long
            &[2, 255, 255, 255, 255, 255, 255, 255, 255],
            &[8, 0],       // unknown flag
            &[4, 0],       // command without a name
            &[4, 2, 5, 1], // name longer than the frame
        ] {
            assert!(Frame::take(&mut bytes.to_vec()).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn ready_has_the_socket_type() {
        let mut buffer = ready("PUB");
        let Some(Frame::Command { name, data }) = Frame::take(&mut buffer).unwrap() else { panic!() };
        assert_eq!((&name[..], socket_type(&data).unwrap()), (&b"READY"[..], b"PUB".to_vec()));
        let identity = [&b"\x08Identity\0\0\0\x01x"[..], &data].concat();
        assert_eq!(socket_type(&identity).unwrap(), b"PUB");
        for bad in [&b""[..], b"\x0bSocket-Type\0\0\0\x09SUB", b"\x0bSocket-Type\0\0", b"\xffx"] {
            assert!(socket_type(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn only_zmtp_3_with_null_is_spoken() {
        assert_eq!(minor_version(&greeting()).unwrap(), 1);
        let changed = |at: usize, byte: u8| {
            let mut bytes = greeting();
            bytes[at] = byte;
            minor_version(&bytes)
        };
        assert_eq!(changed(11, 0).unwrap(), 0);
        for (at, byte) in [(0, b'G'), (10, 1), (12, b'P'), (16, b'X')] {
            assert!(changed(at, byte).is_err(), "{at}");
        }
    }
}
