//! Errors of images and of their processor's configuration.

use crate::format::Format;
use thiserror::Error;

/// Why an image of a request is refused; each message is one sentence for the caller.
#[derive(Debug, Error)]
pub enum ImageError {
    /// No bytes.
    #[error("the image is empty; send the bytes of a PNG, JPEG, WebP or GIF file")]
    Empty,
    /// A known format that is not decoded.
    #[error("the file is {0}, which is not supported; convert it to PNG, JPEG, WebP or GIF")]
    UnsupportedFormat(&'static str),
    /// No known magic bytes.
    #[error("the image has no known format; send the bytes of a PNG, JPEG, WebP or GIF file")]
    UnknownFormat,
    /// More bytes than [`ImageLimits::max_bytes`](crate::ImageLimits::max_bytes).
    #[error("the image has more than {max} bytes; compress it or scale it down")]
    TooManyBytes {
        /// The limit in bytes.
        max: usize,
    },
    /// More pixels than [`ImageLimits::max_pixels`](crate::ImageLimits::max_pixels).
    #[error("the image has {width} x {height} pixels, more than {max} in all; scale it down")]
    TooManyPixels {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// The limit of width times height.
        max: u64,
    },
    /// A side longer than [`ImageLimits::max_side`](crate::ImageLimits::max_side).
    #[error("the image has {width} x {height} pixels, more than {max} on a side; scale it down")]
    SideTooLong {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// The limit of each.
        max: u32,
    },
    /// One side more than [`MAX_RATIO`](crate::MAX_RATIO) times the other.
    #[error("the image has {width} x {height} pixels, and one side may be at most 200 times the other; crop it")]
    TooNarrow {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// The file ends before its pixels do.
    #[error("the {0} image is incomplete; send the whole file")]
    Truncated(Format),
    /// The file breaks its format, or uses a variant that is not decoded.
    #[error("the {format} image cannot be decoded ({message}); save it again, for example as PNG")]
    Damaged {
        /// Its format.
        format: Format,
        /// Description by the decoder.
        message: String,
    },
    /// The decoder would allocate more than the limits allow.
    #[error("the {0} image takes too much memory to decode; save it again, for example as PNG")]
    TooMuchMemory(Format),
    /// Not a data URL in base64.
    #[error("the image's URL is not a data URL in base64; send one such as data:image/png;base64,iVBORw0KGgo...")]
    NotDataUrl,
    /// A character outside of the alphabet.
    #[error("the image's base64 has an invalid character at offset {0}; use A-Z, a-z, 0-9, + and / without escapes")]
    InvalidBase64(usize),
    /// Base64 with the characters - and _.
    #[error("the image's base64 has the URL-safe alphabet; encode it with + and / instead of - and _")]
    UrlSafeBase64,
    /// Base64 of an impossible length.
    #[error("the image's base64 breaks off; send all of it")]
    TruncatedBase64,
    /// An unknown value of `detail`.
    #[error("detail is {0:?}; use low, high, original or auto")]
    UnknownDetail(String),
    /// `min_pixels` above the largest image that the request may have.
    #[error("min_pixels is {min}, above the maximum of {max} pixels for this image; lower it")]
    MinPixels {
        /// The value in the request.
        min: u64,
        /// The limit, after `detail` and `max_pixels`.
        max: u64,
    },
    /// `max_pixels` below one token.
    #[error("max_pixels is {max}, less than the {least} pixels of one token; raise it")]
    MaxPixels {
        /// The value in the request.
        max: u64,
        /// Pixels of one token.
        least: u64,
    },
    /// Pixels that do not form a picture.
    #[error("{bytes} bytes are no picture of {width} x {height} pixels; use multiples of 32 pixels, and RGB in 8 bits")]
    Malformed {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Number of bytes.
        bytes: usize,
    },
}

impl ImageError {
    pub(crate) fn damaged(format: Format, message: impl Into<String>) -> Self {
        // Decoders' messages may hold bytes of the file.
        let message: String = message.into();
        let message = message.chars().filter(|c| !c.is_control()).take(200).collect();
        Self::Damaged { format, message }
    }
}

/// Why a model's image processor is not served.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A file is not a JSON object.
    #[error("{file} is not a JSON object ({message}); download the model again")]
    Json {
        /// Name of the file.
        file: &'static str,
        /// Error of the parser.
        message: String,
    },
    /// A key has a value that is not implemented.
    #[error("{file} has {key} = {value}, and only {expected} is supported; serve the model without images")]
    Unsupported {
        /// Name of the file.
        file: &'static str,
        /// The key.
        key: &'static str,
        /// Its value as JSON.
        value: String,
        /// Supported values.
        expected: &'static str,
    },
}
