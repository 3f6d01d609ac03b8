//! Values of metadata.

use super::header_error::HeaderError;
use super::reader::Reader;
use std::io::Read;

/// Type of a value in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An unsigned integer of 1, 2, 4 or 8 bytes.
    Unsigned(usize),
    /// A signed integer of 1, 2, 4 or 8 bytes.
    Signed(usize),
    /// A float of 4 or 8 bytes.
    Float(usize),
    /// A byte, 0 or 1.
    Bool,
    /// A length of 8 bytes, and the bytes.
    Text,
    /// A type, a count of 8 bytes, and the elements.
    Array,
}

impl Kind {
    fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::Unsigned(1),
            1 => Self::Signed(1),
            2 => Self::Unsigned(2),
            3 => Self::Signed(2),
            4 => Self::Unsigned(4),
            5 => Self::Signed(4),
            6 => Self::Float(4),
            7 => Self::Bool,
            8 => Self::Text,
            9 => Self::Array,
            10 => Self::Unsigned(8),
            11 => Self::Signed(8),
            12 => Self::Float(8),
            _ => return None,
        })
    }

    /// Bytes of a value of fixed size.
    fn size(self) -> Option<usize> {
        match self {
            Self::Unsigned(bytes) | Self::Signed(bytes) | Self::Float(bytes) => Some(bytes),
            Self::Bool => Some(1),
            Self::Text | Self::Array => None,
        }
    }

    /// The kind in words, for messages.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "an integer",
            Self::Float(_) => "a number",
            Self::Bool => "a boolean",
            Self::Text => "a text",
            Self::Array => "an array",
        }
    }
}

/// A value of the metadata, in the encoding of the file.
///
/// An array is kept as the bytes of the file: a vocabulary takes no more memory than there.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Type of the value, or of an array's elements.
    kind: Kind,
    /// Elements of an array; `None` for a single value.
    count: Option<usize>,
    /// The value, little-endian, without the length of a single text; the elements of an array, texts with lengths.
    bytes: Vec<u8>,
}

impl Value {
    /// Reads a value and its type.
    pub(super) fn read(input: &mut Reader<impl Read>, key: &str) -> Result<Self, HeaderError> {
        let mut bytes = Vec::new();
        let kind = read_kind(input, key)?;
        if kind == Kind::Text {
            input.append_string(&mut bytes)?;
            return Ok(Self { kind, count: None, bytes });
        }
        if let Some(size) = kind.size() {
            input.append(size as u64, &mut bytes)?;
            return Ok(Self { kind, count: None, bytes });
        }
        let (kind, count) = (read_kind(input, key)?, input.u64()?);
        match kind.size() {
            Some(size) => {
                let length = count.checked_mul(size as u64);
                let length = length.ok_or_else(|| HeaderError::invalid(format!("{key} has {count} elements")))?;
                input.append(length, &mut bytes)?;
            }
            None if kind == Kind::Text => {
                for _ in 0..count {
                    // Filled in when the length is known.
                    let start = bytes.len();
                    bytes.extend([0; 8]);
                    let length = input.append_string(&mut bytes)?;
                    bytes[start..start + 8].copy_from_slice(&(length as u64).to_le_bytes());
                }
            }
            None => return Err(HeaderError::invalid(format!("{key} is an array of arrays"))),
        }
        Ok(Self { kind, count: Some(count as usize), bytes })
    }

    /// The type in words, for messages.
    pub(super) fn words(&self) -> &'static str {
        if self.count.is_some() { Kind::Array.words() } else { self.kind.words() }
    }

    /// A single non-negative integer.
    pub fn unsigned(&self) -> Option<u64> {
        self.count.is_none().then(|| unsigned(self.kind, &self.bytes)).flatten()
    }

    /// A single number. A float of 4 bytes becomes the shortest decimal that stands for it: 0.1, not 0.10000000149.
    pub fn number(&self) -> Option<f64> {
        match (self.count, self.kind) {
            (None, Kind::Float(4)) => {
                let value = f32::from_le_bytes(self.bytes.first_chunk().copied()?);
                value.is_finite().then(|| value.to_string().parse().ok()).flatten()
            }
            (None, Kind::Float(_)) => Some(f64::from_le_bytes(self.bytes.first_chunk().copied()?)),
            _ => self.unsigned().map(|value| value as f64),
        }
    }

    /// A single boolean.
    pub fn flag(&self) -> Option<bool> {
        (self.count.is_none() && self.kind == Kind::Bool).then(|| self.bytes[0] != 0)
    }

    /// A single text; bytes that are not valid UTF-8 become U+FFFD.
    pub fn text(&self) -> Option<String> {
        let is_text = self.count.is_none() && self.kind == Kind::Text;
        is_text.then(|| String::from_utf8_lossy(&self.bytes).into_owned())
    }

    /// The bytes of an array's texts.
    pub fn texts(&self) -> Option<impl Iterator<Item = &[u8]>> {
        let mut left = match (self.count, self.kind) {
            (Some(_), Kind::Text) => self.bytes.as_slice(),
            // An array without elements may have any type.
            (Some(0), _) => &[],
            _ => return None,
        };
        Some(std::iter::from_fn(move || {
            let (length, rest) = left.split_first_chunk()?;
            let (text, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
            left = rest;
            Some(text)
        }))
    }

    /// The elements of an array of non-negative integers.
    pub fn integers(&self) -> Option<Vec<u64>> {
        let size = self.kind.size()?;
        self.count?;
        self.bytes.chunks_exact(size).map(|bytes| unsigned(self.kind, bytes)).collect()
    }
}

fn read_kind(input: &mut Reader<impl Read>, key: &str) -> Result<Kind, HeaderError> {
    let id = input.u32()?;
    Kind::from_id(id).ok_or_else(|| HeaderError::invalid(format!("{key} has the unknown type {id}")))
}

/// A non-negative integer.
fn unsigned(kind: Kind, bytes: &[u8]) -> Option<u64> {
    let extended = |fill: u8| {
        let mut word = [fill; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    match kind {
        Kind::Unsigned(_) => Some(extended(0)),
        Kind::Signed(_) if bytes.last().is_some_and(|byte| byte & 0x80 == 0) => Some(extended(0)),
        _ => None,
    }
}
