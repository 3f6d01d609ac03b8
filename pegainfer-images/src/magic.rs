//! The format of a file by its first bytes; names and media types are ignored, because clients often get them wrong.

use crate::error::ImageError;
use crate::format::Format;

/// Formats that are refused by name: (magic bytes, description).
const REFUSED: [(&[u8], &str); 9] = [
    (b"%PDF", "a PDF document"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"II+\0", "a TIFF image"),
    (b"BM", "a BMP image"),
    (b"\0\0\x01\0", "an ICO image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
];

/// Number of bytes in which the start of an SVG or HTML document is searched for.
const TEXT_PREFIX: usize = 1024;

/// The format of a file.
///
/// # Errors
/// [`ImageError::Empty`]; [`ImageError::UnsupportedFormat`] for SVG, HEIC, AVIF, TIFF, BMP, PDF and a few others;
/// [`ImageError::UnknownFormat`].
pub(crate) fn identify(bytes: &[u8]) -> Result<Format, ImageError> {
    match bytes {
        [] => return Err(ImageError::Empty),
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => return Ok(Format::Png),
        [0xff, 0xd8, 0xff, ..] => return Ok(Format::Jpeg),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => return Ok(Format::Gif),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => return Ok(Format::WebP),
        _ => {}
    }
    let magic = REFUSED.iter().find(|(magic, _)| bytes.starts_with(magic)).map(|(_, name)| *name);
    match magic.or_else(|| media_container(bytes)).or_else(|| document(bytes)) {
        Some(name) => Err(ImageError::UnsupportedFormat(name)),
        None => Err(ImageError::UnknownFormat),
    }
}

/// HEIC, AVIF or a video, by the brand of an ISO base media file.
fn media_container(bytes: &[u8]) -> Option<&'static str> {
    if bytes.get(4..8)? != b"ftyp" {
        return None;
    }
    Some(match bytes.get(8..12)? {
        b"avif" | b"avis" => "an AVIF image",
        b"heic" | b"heix" | b"heim" | b"heis" | b"hevc" | b"hevx" | b"mif1" | b"msf1" => "a HEIC image",
        _ => "a video",
    })
}

/// SVG or HTML, by its first element.
fn document(bytes: &[u8]) -> Option<&'static str> {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(TEXT_PREFIX)]).to_ascii_lowercase();
    let text = text.trim_start_matches('\u{feff}').trim_start();
    if !text.starts_with('<') {
        return None;
    }
    if text.contains("<svg") || text.contains("doctype svg") {
        return Some("an SVG drawing");
    }
    text.contains("html").then_some("an HTML document")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_their_first_bytes() {
        let name = |bytes: &[u8]| identify(bytes).map_err(|error| error.to_string());
        assert_eq!(name(b"GIF89a"), Ok(Format::Gif));
        assert_eq!(name(b"RIFF\0\0\0\0WEBP"), Ok(Format::WebP));
        for (bytes, expected) in [
            (&b"\0\0\0\x18ftypheic"[..], "HEIC"),
            (b"\0\0\0\x18ftypavif", "AVIF"),
            (b"\0\0\0\x18ftypisom", "video"),
            (b"%PDF-1.7", "PDF"),
            (b"BM\0\0\0\0", "BMP"),
            (b"MM\0*", "TIFF"),
            (b"\xef\xbb\xbf <?xml version='1.0'?>\n<!-- a --><SVG>", "SVG"),
            (b"<!DOCTYPE html><p>", "HTML"),
        ] {
            let message = name(bytes).unwrap_err();
            assert!(message.contains(expected) && message.contains("convert it"), "{message}");
        }
        for bytes in [&b"GIF"[..], b"RIFF\0\0\0\0WAVE", b"text", b"\0\0\0\x18ftyp", b"<a/>"] {
            assert!(matches!(identify(bytes), Err(ImageError::UnknownFormat)), "{bytes:?}");
        }
        assert!(matches!(identify(b""), Err(ImageError::Empty)));
    }
}
