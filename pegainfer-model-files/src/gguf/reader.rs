//! Reads little-endian fields of a header whose length is bounded by the file's size.

use super::header_error::HeaderError;
use std::io::Read;

/// Longest name of a tensor, key or metadata text field shown in an error message, in bytes.
const SHOWN: usize = 64;

/// A header that is read front to back. No length in the file is trusted beyond the bytes that are left.
pub(super) struct Reader<R> {
    input: R,
    /// Bytes read so far.
    at: u64,
    /// Size of the file.
    end: u64,
}

impl<R: Read> Reader<R> {
    /// A reader of the beginning of a file of `file_bytes` bytes.
    pub fn new(input: R, file_bytes: u64) -> Self {
        Self { input, at: 0, end: file_bytes }
    }

    /// Offset of the next byte.
    pub fn position(&self) -> u64 {
        self.at
    }

    fn claim(&mut self, bytes: u64) -> Result<(), HeaderError> {
        if bytes > self.end - self.at {
            let left = self.end - self.at;
            return Err(HeaderError::invalid(format!("its header asks for {bytes} bytes and {left} are left")));
        }
        self.at += bytes;
        Ok(())
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        self.claim(N as u64)?;
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes).map_err(HeaderError::Io)?;
        Ok(bytes)
    }

    pub fn u32(&mut self) -> Result<u32, HeaderError> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, HeaderError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A length and as many bytes, appended to `out`.
    pub fn append_string(&mut self, out: &mut Vec<u8>) -> Result<usize, HeaderError> {
        let length = self.u64()?;
        self.append(length, out)?;
        Ok(length as usize)
    }

    /// Appends `length` bytes to `out`. Memory grows with the bytes that were read, not with `length`.
    pub fn append(&mut self, length: u64, out: &mut Vec<u8>) -> Result<(), HeaderError> {
        self.claim(length)?;
        let read = self.input.by_ref().take(length).read_to_end(out).map_err(HeaderError::Io)?;
        match read as u64 == length {
            true => Ok(()),
            false => Err(HeaderError::Io(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// A name of up to `max` bytes, of valid UTF-8. `what` names it in errors.
    pub fn name(&mut self, max: u64, what: &str) -> Result<String, HeaderError> {
        let length = self.u64()?;
        if length == 0 || length > max {
            return Err(HeaderError::invalid(format!("{what} has {length} bytes, and may have 1 to {max}")));
        }
        let mut bytes = Vec::new();
        self.append(length, &mut bytes)?;
        String::from_utf8(bytes).map_err(|_| HeaderError::invalid(format!("{what} is not valid UTF-8")))
    }
}

/// A name from a file as an error message shows it: one line, cut after 64 bytes.
pub(super) fn shown(name: &str) -> String {
    let end = (0..=SHOWN.min(name.len())).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    let dots = if end < name.len() { "..." } else { "" };
    format!("{}{dots}", name[..end].escape_debug())
}
