//! Compressed request bodies (`Content-Encoding`), decoded as they arrive.
//!
//! A kilobyte can become a megabyte. Bytes are decoded in small steps, so that the limit on a body's size and the
//! memory budget count decoded bytes before more are decoded.

use crate::error::{ApiError, truncate_for_error};
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, header};
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use std::io::Write;

/// Compressed bytes decoded in one step. Deflate yields at most 1,032 bytes of each.
const STEP: usize = 256;

/// Decodes one body.
pub(super) struct Decoder {
    /// `None` if the body is not compressed.
    stream: Option<Stream>,
    /// Bytes received and not decoded yet.
    rest: Bytes,
}

enum Stream {
    Gzip(MultiGzDecoder<Vec<u8>>),
    Deflate(ZlibDecoder<Vec<u8>>),
}

impl Decoder {
    /// The decoder for a request with these headers.
    ///
    /// # Errors
    /// 415: the encoding is unknown, or there is more than one.
    pub(super) fn from_headers(headers: &HeaderMap) -> Result<Self, ApiError> {
        let given: Vec<&[u8]> =
            headers.get_all(header::CONTENT_ENCODING).iter().map(|value| value.as_bytes()).collect();
        let name = String::from_utf8_lossy(&given.join(&b", "[..])).trim().to_ascii_lowercase();
        let stream = match name.as_str() {
            "" | "identity" => None,
            "gzip" | "x-gzip" => Some(Stream::Gzip(MultiGzDecoder::new(Vec::new()))),
            "deflate" => Some(Stream::Deflate(ZlibDecoder::new(Vec::new()))),
            name => {
                let name = truncate_for_error(name);
                let message = format!("Content-Encoding must be gzip, deflate or identity, got {name:?}");
                return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
            }
        };
        Ok(Self { stream, rest: Bytes::new() })
    }

    /// Takes received bytes. Earlier ones must be decoded already.
    pub(super) fn feed(&mut self, bytes: Bytes) {
        self.rest = bytes;
    }

    /// The next part of the body, which may be empty; `None` if more bytes are needed.
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let Some(stream) = &mut self.stream else { return Ok(Some(std::mem::take(&mut self.rest))) };
        let step = self.rest.split_to(STEP.min(self.rest.len()));
        match stream.decode(&step) {
            Ok(part) => Ok(Some(part.into())),
            Err(error) => Err(stream.malformed(&error)),
        }
    }

    /// Checks that the body is complete.
    pub(super) fn finish(self) -> Result<(), ApiError> {
        let Some(mut stream) = self.stream else { return Ok(()) };
        stream.finish().map_err(|error| stream.malformed(&error))
    }
}

impl Stream {
    /// Decodes all of the bytes.
    fn decode(&mut self, bytes: &[u8]) -> std::io::Result<Vec<u8>> {
        let decoded = match self {
            Self::Gzip(decoder) => {
                decoder.write_all(bytes)?;
                decoder.flush()?;
                decoder.get_mut()
            }
            Self::Deflate(decoder) => {
                decoder.write_all(bytes)?;
                decoder.flush()?;
                decoder.get_mut()
            }
        };
        Ok(std::mem::take(decoded))
    }

    fn finish(&mut self) -> std::io::Result<()> {
        match self {
            Self::Gzip(decoder) => decoder.try_finish(),
            Self::Deflate(decoder) => decoder.try_finish(),
        }
    }

    fn malformed(&self, error: &std::io::Error) -> ApiError {
        let name = match self {
            Self::Gzip(_) => "gzip",
            Self::Deflate(_) => "deflate (zlib)",
        };
        let message = format!("the request body is not the {name} that Content-Encoding names: {error}");
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};

    fn decoder(encoding: &'static str) -> Result<Decoder, ApiError> {
        Decoder::from_headers(&HeaderMap::from_iter([(header::CONTENT_ENCODING, encoding.parse().unwrap())]))
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    /// The decoded parts of a body that arrives in frames of `frame` bytes.
    fn decode(mut decoder: Decoder, body: &[u8], frame: usize) -> Result<Vec<Bytes>, ApiError> {
        let mut parts = Vec::new();
        for frame in body.chunks(frame) {
            decoder.feed(Bytes::copy_from_slice(frame));
            while let Some(part) = decoder.next()? {
                parts.push(part);
            }
        }
        decoder.finish().map(|()| parts)
    }

    #[test]
    fn bodies_are_decoded_however_they_are_cut() {
        let text: Vec<u8> = (0..5000u32).flat_map(|i| (i * i).to_string().into_bytes()).collect();
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
        zlib.write_all(&text).unwrap();
        let (half, rest) = text.split_at(777);
        let members = [gzip(half), gzip(rest)].concat();
        for (encoding, body) in [
            ("identity", text.clone()),
            ("gzip", gzip(&text)),
            (" X-GZip", members),
            ("deflate", zlib.finish().unwrap()),
        ] {
            for frame in [1, 100, 1 << 20] {
                let parts = decode(decoder(encoding).unwrap(), &body, frame).unwrap();
                assert!(parts.concat() == text, "{encoding} {frame}");
            }
        }
    }

    #[test]
    fn a_bomb_comes_in_small_parts() {
        let bomb = gzip(&vec![0; 64 << 20]);
        assert!(bomb.len() < 70_000);
        let mut decoder = decoder("gzip").unwrap();
        decoder.feed(bomb.into());
        let mut total = 0;
        while total < 8 << 20 {
            let part = decoder.next().unwrap().unwrap();
            assert!(part.len() <= STEP * 1040 + (64 << 10), "{}", part.len());
            total += part.len();
        }
    }

    #[test]
    fn bodies_in_another_encoding_are_refused() {
        for encoding in ["br", "zstd", "gzip, gzip", "gzip;q=1"] {
            assert_eq!(decoder(encoding).err().unwrap().status(), StatusCode::UNSUPPORTED_MEDIA_TYPE, "{encoding}");
        }
        let whole = gzip(b"{}");
        let mut damaged = whole.clone();
        damaged[whole.len() - 6] ^= 1;
        for body in
            [b"{}".to_vec(), whole[..whole.len() - 3].to_vec(), damaged, [whole.clone(), b"x".to_vec()].concat()]
        {
            let error = decode(decoder("gzip").unwrap(), &body, 100).err().unwrap();
            assert_eq!(error.status(), StatusCode::BAD_REQUEST, "{body:?}");
        }
    }
}
