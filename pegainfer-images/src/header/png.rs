//! Chunks of PNG: length (u32, big-endian), type (4 bytes), data, CRC (4 bytes), after 8 bytes of signature.

use super::fields::{Fields, array, u32_be};

/// Position of the first chunk.
const FIRST: usize = 8;

/// The size in `IHDR`, and the data of `eXIf`, which may come after the pixels.
pub(super) fn read(bytes: &[u8]) -> Option<Fields<'_>> {
    if u32_be(bytes, FIRST)? != 13 || array(bytes, FIRST + 4)? != *b"IHDR" {
        return None;
    }
    Some(Fields { width: u32_be(bytes, FIRST + 8)?, height: u32_be(bytes, FIRST + 12)?, exif: exif(bytes) })
}

fn exif(bytes: &[u8]) -> Option<&[u8]> {
    let mut at = FIRST;
    loop {
        let length = usize::try_from(u32_be(bytes, at)?).ok()?;
        let data = at + 8;
        match array(bytes, at + 4)? {
            kind if kind == *b"eXIf" => return bytes.get(data..data.checked_add(length)?),
            kind if kind == *b"IEND" => return None,
            _ => at = data.checked_add(length)?.checked_add(4)?,
        }
    }
}
