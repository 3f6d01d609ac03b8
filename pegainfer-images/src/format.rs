//! Formats of images.

use std::fmt;

/// A format that is decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Portable Network Graphics; of an animation, the default image.
    Png,
    /// JPEG: baseline and progressive.
    Jpeg,
    /// WebP: lossy and lossless; of an animation, the first frame.
    WebP,
    /// Graphics Interchange Format; of an animation, the first frame.
    Gif,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::WebP => "WebP",
            Self::Gif => "GIF",
        })
    }
}
