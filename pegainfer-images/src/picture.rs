//! The pixels of an image as a vision tower reads them.

use crate::decode::Rgb8;
use crate::error::ImageError;
use crate::size::{FACTOR, PATCH};
use std::fmt;
use std::sync::Arc;

/// A scaled image. Clones share the pixels.
///
/// A tower reads `x = value / 127.5 - 1` in f32, in patches of [`PATCH`] x `PATCH` pixels.
#[derive(Clone, PartialEq, Eq)]
pub struct Picture {
    pixels: Arc<[u8]>,
    width: u32,
    height: u32,
}

impl Picture {
    /// A picture of `pixels`: red, green and blue of each pixel, row by row, `3 * width * height` bytes.
    ///
    /// # Errors
    /// [`ImageError::Malformed`] for another number of bytes, or sides that are not positive multiples of [`FACTOR`].
    pub fn new(pixels: impl Into<Arc<[u8]>>, width: u32, height: u32) -> Result<Self, ImageError> {
        let pixels = pixels.into();
        let is_side = |side: u32| side > 0 && side.is_multiple_of(FACTOR);
        let bytes = 3 * u128::from(width) * u128::from(height);
        if !is_side(width) || !is_side(height) || bytes != pixels.len() as u128 {
            return Err(ImageError::Malformed { width, height, bytes: pixels.len() });
        }
        Ok(Self { pixels, width, height })
    }

    /// Red, green and blue of each pixel, row by row: `3 * width * height` bytes.
    pub fn pixels(&self) -> &Arc<[u8]> {
        &self.pixels
    }

    /// Width in pixels, a multiple of [`FACTOR`].
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Height in pixels, a multiple of [`FACTOR`].
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Rows and columns of patches, both even: `(height / 16, width / 16)`.
    pub fn grid(&self) -> (u32, u32) {
        (self.height / PATCH, self.width / PATCH)
    }

    /// Tokens in the prompt, one for each block of 2 x 2 patches.
    pub fn tokens(&self) -> u32 {
        (self.height / FACTOR) * (self.width / FACTOR)
    }
}

impl TryFrom<Rgb8> for Picture {
    type Error = ImageError;

    fn try_from(image: Rgb8) -> Result<Self, ImageError> {
        Self::new(image.pixels, image.width, image.height)
    }
}

/// Size, without the pixels.
impl fmt::Debug for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Picture({} x {})", self.width, self.height)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_a_grid_of_patches() {
        let pixels: Vec<u8> = (0..64 * 96 * 3).map(|i| (i % 251) as u8).collect();
        let wide = Picture::new(pixels.clone(), 96, 64).unwrap();
        assert_eq!((wide.grid(), wide.tokens(), wide.width(), wide.height()), ((4, 6), 6, 96, 64));
        let tall = Picture::new(pixels.clone(), 64, 96).unwrap();
        assert!(tall != wide);
        assert_eq!(wide, Picture::new(pixels, 96, 64).unwrap());
        assert!(format!("{wide:?}").len() < 50, "{wide:?}");
    }

    #[test]
    fn malformed_pictures_are_refused() {
        for (bytes, width, height) in
            [(0, 0, 32), (32 * 32 * 3 - 1, 32, 32), (48 * 32 * 3, 48, 32), (0, 1 << 31, 1 << 31)]
        {
            let error = Picture::new(vec![0; bytes], width, height).unwrap_err();
            assert!(matches!(error, ImageError::Malformed { .. }), "{error}");
        }
    }
}
