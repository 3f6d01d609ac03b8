//! Markers of JPEG: 0xff and a code; most are followed by a length (u16, big-endian, itself included) and data.

use super::fields::{Fields, u16_be};

/// Start of the data of an APP1 segment that holds EXIF.
pub(crate) const EXIF: &[u8] = b"Exif\0\0";

/// End of image.
const EOI: u8 = 0xd9;
/// Start of scan: entropy-coded pixels follow its segment.
const SOS: u8 = 0xda;
/// Application segment 1.
const APP1: u8 = 0xe1;

/// A marker and the data of its segment.
struct Segment<'a> {
    code: u8,
    data: &'a [u8],
}

/// Segments from the start of the file; entropy-coded data and bytes that are no marker are skipped.
struct Segments<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Segments<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        // After the start of image.
        Self { bytes, at: 2 }
    }

    /// Moves to the code after the next 0xff that starts a marker; stuffed zeros and fill bytes do not.
    fn next_code(&mut self) -> Option<u8> {
        loop {
            self.at += self.bytes.get(self.at..)?.iter().position(|byte| *byte == 0xff)? + 1;
            match *self.bytes.get(self.at)? {
                0x00 => self.at += 1,
                0xff => {}
                code => return Some(code),
            }
        }
    }
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    fn next(&mut self) -> Option<Segment<'a>> {
        let code = self.next_code()?;
        self.at += 1;
        // Temporary, restart, start and end of image: they have no data.
        if matches!(code, 0x01 | 0xd0..=0xd9) {
            return Some(Segment { code, data: &[] });
        }
        let length = usize::from(u16_be(self.bytes, self.at)?);
        let data = self.bytes.get(self.at + 2..self.at + length)?;
        self.at += length;
        Some(Segment { code, data })
    }
}

/// True for markers of a frame header, whatever the compression.
fn is_frame(code: u8) -> bool {
    // 0xc4, 0xc8 and 0xcc are Huffman tables, reserved, and arithmetic conditioning.
    matches!(code, 0xc0..=0xcf) && !matches!(code, 0xc4 | 0xc8 | 0xcc)
}

/// The size in the first frame header, and the EXIF data of the first such segment before the first scan.
pub(super) fn read(bytes: &[u8]) -> Option<Fields<'_>> {
    let (mut size, mut exif) = (None, None);
    for Segment { code, data } in Segments::new(bytes) {
        match code {
            SOS | EOI => break,
            APP1 if exif.is_none() => exif = data.strip_prefix(EXIF),
            // One byte of precision, then height and width.
            code if is_frame(code) && size.is_none() => size = Some((u16_be(data, 3)?, u16_be(data, 1)?)),
            _ => {}
        }
    }
    let (width, height) = size?;
    Some(Fields { width: width.into(), height: height.into(), exif })
}

/// True if the file has scans and an end marker after them. Without one, decoders fill the missing part with grey.
pub(crate) fn is_complete(bytes: &[u8]) -> bool {
    let mut has_scan = false;
    for segment in Segments::new(bytes) {
        has_scan |= segment.code == SOS;
        if segment.code == EOI {
            return has_scan;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of one frame of 2 x 1 pixels and one scan; the thumbnail in its EXIF data has an end marker.
    fn file(scan: &[u8]) -> Vec<u8> {
        let mut bytes = b"\xff\xd8junk\xff\xff\xe1\x00\x0eExif\0\0\xff\xd8\xff\xda\xff\xd9".to_vec();
        bytes.extend_from_slice(b"\xff\xc4\x00\x02\xff\xc2\x00\x08\x08\x00\x01\x00\x02\x01\xff\xda\x00\x03\0");
        bytes.extend_from_slice(scan);
        bytes
    }

    #[test]
    fn a_thumbnail_and_stuffed_bytes_are_no_markers() {
        for (scan, complete) in [
            (&b"a\xff\x00\xff\xd9"[..], true),
            (b"a\xff\xd0b\xff\xff\xd9trailer", true),
            (b"a\xff\xc4\x00\x02\xff\xda\x00\x02b\xff\xd9", true),
            (b"a\xff\x00\xd9", false),
            (b"a\xff\xc4\xff\xff\xff\xd9", false),
            (b"", false),
        ] {
            let bytes = file(scan);
            let fields = read(&bytes).unwrap();
            assert_eq!((fields.width, fields.height), (2, 1));
            assert_eq!(fields.exif, Some(&b"\xff\xd8\xff\xda\xff\xd9"[..]));
            assert_eq!(is_complete(&bytes), complete, "{scan:x?}");
        }
        assert!(read(b"\xff\xd8\xff\xd9").is_none() && !is_complete(b"\xff\xd8\xff\xd9"));
    }
}
