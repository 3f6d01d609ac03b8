//! Images as text: base64, alone or in a data URL.

use crate::error::ImageError;
use crate::limits::ImageLimits;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{DecodeError, Engine};
use std::borrow::Cow;

/// The standard alphabet; padding is optional, and unused bits of the last character are ignored.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// The bytes of `data:MEDIA_TYPE;base64,TEXT`. The media type is ignored, because clients often get it wrong.
///
/// # Errors
/// [`ImageError::NotDataUrl`] for other URLs, and the errors of [`from_base64`].
pub fn from_data_url(url: &str, limits: &ImageLimits) -> Result<Vec<u8>, ImageError> {
    let (head, text) = url.trim_start().split_once(',').ok_or(ImageError::NotDataUrl)?;
    let is_data = head.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
    let is_base64 = head.rsplit_once(';').is_some_and(|(_, encoding)| encoding.trim().eq_ignore_ascii_case("base64"));
    if !is_data || !is_base64 {
        return Err(ImageError::NotDataUrl);
    }
    from_base64(text, limits)
}

/// The bytes of base64 text in the standard alphabet. Padding is optional, and white space is ignored.
///
/// # Errors
/// [`ImageError::TooManyBytes`] before anything is allocated, [`ImageError::InvalidBase64`] with the offset of the
/// character, [`ImageError::UrlSafeBase64`] and [`ImageError::TruncatedBase64`].
pub fn from_base64(text: &str, limits: &ImageLimits) -> Result<Vec<u8>, ImageError> {
    let spaces = text.bytes().filter(u8::is_ascii_whitespace).count();
    // Four characters stand for three bytes; up to two of padding stand for none.
    limits.check_bytes(((text.len() - spaces) / 4 * 3).saturating_sub(2))?;
    let packed = match spaces {
        0 => Cow::Borrowed(text.as_bytes()),
        _ => Cow::Owned(text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect()),
    };
    let bytes = BASE64.decode(&packed).map_err(|error| match error {
        DecodeError::InvalidByte(..) => invalid_character(text),
        _ => ImageError::TruncatedBase64,
    })?;
    limits.check_bytes(bytes.len())?;
    Ok(bytes)
}

/// The error for the first character that is not in the alphabet, or for padding before the end.
fn invalid_character(text: &str) -> ImageError {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"+/".contains(&byte) || byte.is_ascii_whitespace();
    match text.bytes().enumerate().find(|(_, byte)| !is_valid(*byte)) {
        Some((_, b'-' | b'_')) => ImageError::UrlSafeBase64,
        Some((at, _)) => ImageError::InvalidBase64(at),
        None => ImageError::TruncatedBase64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(text: &str) -> Result<Vec<u8>, String> {
        from_base64(text, &ImageLimits::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn padding_is_optional_and_white_space_is_ignored() {
        for text in ["/+8=", "/+8", " /+\n8=\r\n", "/+9="] {
            assert_eq!(decoded(text), Ok(vec![0xff, 0xef]), "{text:?}");
        }
        assert_eq!(decoded(""), Ok(vec![]));
    }

    #[test]
    fn errors_say_what_is_wrong() {
        assert!(decoded("_-8=").unwrap_err().contains("URL-safe"));
        assert!(decoded("AA%2B").unwrap_err().contains("offset 2"));
        assert!(decoded("A A=A").unwrap_err().contains("offset 3"));
        assert!(decoded("AAAAA").unwrap_err().contains("breaks off"));
    }

    #[test]
    fn limits_hold_before_and_after_decoding() {
        let limits = ImageLimits { max_bytes: 4, ..ImageLimits::default() };
        assert_eq!(from_base64("AAAAAA==", &limits).unwrap().len(), 4);
        for text in ["AAAAAAA=", "AAAAAAA", &"A".repeat(1 << 20)] {
            assert!(matches!(from_base64(text, &limits), Err(ImageError::TooManyBytes { max: 4 })));
        }
    }

    #[test]
    fn data_urls_may_have_any_media_type() {
        let limits = ImageLimits::default();
        for url in ["data:image/png;base64,AAAA", "DATA:;BASE64, AAAA", "data:image/x;charset=utf-8; base64,AAAA"] {
            assert_eq!(from_data_url(url, &limits).unwrap(), [0; 3], "{url}");
        }
        for url in ["https://a/b.png", "data:image/png,AAAA", "data:base64,AAAA", "AAAA", "file:///a;base64,AAAA", "é,"]
        {
            assert!(matches!(from_data_url(url, &limits), Err(ImageError::NotDataUrl)), "{url}");
        }
    }
}
