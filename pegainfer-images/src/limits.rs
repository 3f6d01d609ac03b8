//! Limits of one image.

use crate::error::ImageError;

/// Limits of one image, checked before anything is allocated for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLimits {
    /// Maximum size of the file in bytes: 20 MiB.
    pub max_bytes: usize,
    /// Maximum of width times height: 67,108,864, a square of 8,192.
    pub max_pixels: u64,
    /// Maximum width and height in pixels: 16,384.
    pub max_side: u32,
    /// Memory that a decoder may take beyond 4 bytes for each pixel: 64 MiB.
    pub decoder_bytes: u64,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self { max_bytes: 20 << 20, max_pixels: 64 << 20, max_side: 16_384, decoder_bytes: 64 << 20 }
    }
}

impl ImageLimits {
    /// Checks the number of bytes of a file.
    pub(crate) fn check_bytes(&self, bytes: usize) -> Result<(), ImageError> {
        if bytes > self.max_bytes { Err(ImageError::TooManyBytes { max: self.max_bytes }) } else { Ok(()) }
    }

    /// Checks the size in pixels that a header declares.
    pub(crate) fn check_size(&self, width: u32, height: u32) -> Result<(), ImageError> {
        if width.max(height) > self.max_side {
            return Err(ImageError::SideTooLong { width, height, max: self.max_side });
        }
        if u64::from(width) * u64::from(height) > self.max_pixels {
            return Err(ImageError::TooManyPixels { width, height, max: self.max_pixels });
        }
        Ok(())
    }

    /// Memory limit of the decoder of an image of that size, in bytes: `decoder_bytes + 4 width height`.
    pub(crate) fn max_alloc(&self, width: u32, height: u32) -> u64 {
        self.decoder_bytes.saturating_add(4 * u64::from(width) * u64::from(height))
    }
}
