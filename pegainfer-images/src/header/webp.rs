//! Chunks of WebP, after 12 bytes of RIFF: type (4 bytes), length (u32, little-endian), data, padding to an even length.

use super::fields::{Fields, array, u16_le, u32_le};

/// Position of the first chunk.
const FIRST: usize = 12;
/// Bits of the flags of `VP8X`.
const ANIMATION: u8 = 1 << 1;
const EXIF: u8 = 1 << 3;
/// Bytes of an `ANMF` chunk before its own chunks.
const FRAME_FIELDS: usize = 16;

/// Chunks of a file or of a frame; a last chunk that is cut off has the data that are there.
struct Chunks<'a>(&'a [u8]);

impl<'a> Iterator for Chunks<'a> {
    type Item = ([u8; 4], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (kind, length) = (array(self.0, 0)?, usize::try_from(u32_le(self.0, 4)?).ok()?);
        let rest = &self.0[8..];
        let data = &rest[..length.min(rest.len())];
        self.0 = rest.get(length.saturating_add(length % 2)..).unwrap_or_default();
        Some((kind, data))
    }
}

/// The size of the canvas, and the EXIF data. The bitstream that is decoded has to have the size that its container
/// declares: decoders allocate by it.
pub(super) fn read(bytes: &[u8]) -> Option<Fields<'_>> {
    let (kind, data) = Chunks(bytes.get(FIRST..)?).next()?;
    if kind != *b"VP8X" {
        let (width, height) = bitstream(kind, data)?;
        return Some(Fields { width, height, exif: None });
    }
    let flags = *data.first()?;
    let (width, height) = (u24_le(data, 4)? + 1, u24_le(data, 7)? + 1);
    let mut chunks = Chunks(&bytes[FIRST..]);
    let (found, expected) = if flags & ANIMATION == 0 {
        (chunks.find_map(|(kind, data)| bitstream(kind, data))?, (width, height))
    } else {
        let (_, frame) = chunks.find(|(kind, _)| kind == b"ANMF")?;
        (frame_bitstream(frame)?, (u24_le(frame, 6)? + 1, u24_le(frame, 9)? + 1))
    };
    let is_inside = expected.0 <= width && expected.1 <= height;
    let exif = Chunks(&bytes[FIRST..]).find(|(kind, _)| flags & EXIF != 0 && kind == b"EXIF");
    (found == expected && is_inside).then_some(Fields { width, height, exif: exif.map(|(_, data)| data) })
}

/// Width and height of the bitstream in an `ANMF` chunk: its first chunk, or a lossy one after the alpha channel.
fn frame_bitstream(frame: &[u8]) -> Option<(u32, u32)> {
    let mut chunks = Chunks(frame.get(FRAME_FIELDS..)?);
    let (kind, data) = match chunks.next()? {
        (kind, _) if kind == *b"ALPH" => chunks.next().filter(|(kind, _)| kind == b"VP8 ")?,
        chunk => chunk,
    };
    bitstream(kind, data)
}

/// Width and height of a `VP8 ` or `VP8L` chunk.
fn bitstream(kind: [u8; 4], data: &[u8]) -> Option<(u32, u32)> {
    match &kind {
        b"VP8 " => {
            // Three bytes of frame tag, then the start code. The upper two bits of each size are a scale.
            (array(data, 3)? == [0x9d, 0x01, 0x2a]).then_some(())?;
            Some((u32::from(u16_le(data, 6)? & 0x3fff), u32::from(u16_le(data, 8)? & 0x3fff)))
        }
        b"VP8L" => {
            (*data.first()? == 0x2f).then_some(())?;
            let sizes = u32_le(data, 1)?;
            Some(((sizes & 0x3fff) + 1, (sizes >> 14 & 0x3fff) + 1))
        }
        _ => None,
    }
}

fn u24_le(bytes: &[u8], at: usize) -> Option<u32> {
    let [a, b, c] = array(bytes, at)?;
    Some(u32::from_le_bytes([a, b, c, 0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
        let padding = &b"\0"[..data.len() % 2];
        [kind, &(data.len() as u32).to_le_bytes()[..], data, padding].concat()
    }

    fn lossless(width: u32, height: u32) -> Vec<u8> {
        chunk(b"VP8L", &[&[0x2f][..], &((width - 1) | (height - 1) << 14).to_le_bytes()].concat())
    }

    fn extended(flags: u8, chunks: &[Vec<u8>]) -> Vec<u8> {
        // A canvas of 5 x 3 pixels.
        let canvas = chunk(b"VP8X", &[flags, 0, 0, 0, 4, 0, 0, 2, 0, 0]);
        [&b"RIFF\0\0\0\0WEBP"[..], &canvas, &chunks.concat()].concat()
    }

    fn frame(width: u8, height: u8, stream: &[u8]) -> Vec<u8> {
        let fields = [0, 0, 0, 0, 0, 0, width - 1, 0, 0, height - 1, 0, 0, 0, 0, 0, 0];
        chunk(b"ANMF", &[&fields[..], stream].concat())
    }

    #[test]
    fn bitstreams_have_the_size_of_their_container() {
        let size = |bytes: &[u8]| read(bytes).map(|fields| (fields.width, fields.height, fields.exif.map(<[u8]>::len)));
        let exif = chunk(b"EXIF", b"exif.");
        assert_eq!(size(&extended(EXIF, &[lossless(5, 3), exif.clone()])), Some((5, 3, Some(5))));
        assert_eq!(size(&extended(0, &[lossless(5, 3), exif])), Some((5, 3, None)));
        assert_eq!(size(&extended(0, &[lossless(16384, 16384)])), None);
        assert_eq!(size(&extended(0, &[])), None);
        assert_eq!(size(&extended(ANIMATION, &[frame(2, 3, &lossless(2, 3))])), Some((5, 3, None)));
        assert_eq!(size(&extended(ANIMATION, &[frame(2, 3, &lossless(16384, 3))])), None);
        assert_eq!(size(&extended(ANIMATION, &[frame(6, 3, &lossless(6, 3))])), None);
        let lossy = chunk(b"VP8 ", &[0, 0, 0, 0x9d, 0x01, 0x2a, 2, 0x40, 3, 0x80]);
        let alpha = chunk(b"ALPH", b"abc");
        assert_eq!(size(&extended(ANIMATION, &[frame(2, 3, &[&alpha[..], &lossy].concat())])), Some((5, 3, None)));
        assert_eq!(size(&extended(ANIMATION, &[frame(2, 3, &[&alpha[..], &lossless(2, 3)].concat())])), None);
        assert_eq!(size(&[&b"RIFF\0\0\0\0WEBP"[..], &lossy].concat()), Some((2, 3, None)));
    }
}
