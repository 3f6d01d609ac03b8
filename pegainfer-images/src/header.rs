//! Sizes and orientations of images, read without decoding.
//!
//! The decoders' own header readers inflate colour profiles and copy the file; these only follow lengths.

mod fields;
pub(crate) mod jpeg;
mod png;
mod webp;

use crate::error::ImageError;
use crate::format::Format;
use crate::limits::ImageLimits;
use crate::magic::identify;
use fields::{Fields, u16_le};
use image::metadata::Orientation;

/// What the header of an image says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The file's format.
    pub format: Format,
    /// Width in pixels of the upright image, after the orientation tag.
    pub width: u32,
    /// Height in pixels of the upright image, after the orientation tag.
    pub height: u32,
    /// Transformation that makes the stored image upright.
    pub(crate) orientation: Orientation,
}

impl Header {
    /// Width times height.
    pub fn pixels(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Width and height in pixels as the file stores them.
    pub(crate) fn stored_size(&self) -> (u32, u32) {
        if swaps_sides(self.orientation) { (self.height, self.width) } else { (self.width, self.height) }
    }

    /// Refuses an image of which a decoder reads another size than [`probe`], by which limits were checked.
    pub(crate) fn check_size(&self, found: (u32, u32)) -> Result<(), ImageError> {
        if found == self.stored_size() {
            return Ok(());
        }
        Err(ImageError::damaged(self.format, format!("two sizes, one of them {} x {} pixels", found.0, found.1)))
    }
}

/// Reads the header of an image: format, and size after the EXIF orientation. It allocates nothing and decodes nothing.
///
/// # Errors
/// Every error of [`decode`](crate::decode) that the header shows: unknown and unsupported formats, sizes beyond the
/// limits, and damaged headers.
pub fn probe(bytes: &[u8], limits: &ImageLimits) -> Result<Header, ImageError> {
    limits.check_bytes(bytes.len())?;
    let format = identify(bytes)?;
    let fields = match format {
        Format::Png => png::read(bytes),
        Format::Jpeg => jpeg::read(bytes),
        Format::WebP => webp::read(bytes),
        Format::Gif => gif(bytes),
    };
    let Fields { width, height, exif } = fields.ok_or_else(|| ImageError::damaged(format, "no valid header"))?;
    if width == 0 || height == 0 {
        return Err(ImageError::damaged(format, format!("a size of {width} x {height} pixels")));
    }
    limits.check_size(width, height)?;
    let orientation = exif.and_then(orientation).unwrap_or(Orientation::NoTransforms);
    let (width, height) = if swaps_sides(orientation) { (height, width) } else { (width, height) };
    Ok(Header { format, width, height, orientation })
}

/// The logical screen of a GIF.
fn gif(bytes: &[u8]) -> Option<Fields<'_>> {
    Some(Fields { width: u16_le(bytes, 6)?.into(), height: u16_le(bytes, 8)?.into(), exif: None })
}

/// The orientation tag of EXIF data, which may begin with the marker of JPEG files.
fn orientation(exif: &[u8]) -> Option<Orientation> {
    Orientation::from_exif_chunk(exif.strip_prefix(jpeg::EXIF).unwrap_or(exif))
}

fn swaps_sides(orientation: Orientation) -> bool {
    use Orientation::{Rotate90, Rotate90FlipH, Rotate270, Rotate270FlipH};
    matches!(orientation, Rotate90 | Rotate270 | Rotate90FlipH | Rotate270FlipH)
}
