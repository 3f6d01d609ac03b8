//! Decoding to RGB of 8 bits: upright, over white, colour profiles ignored.

mod alpha;
mod png;

use crate::error::ImageError;
use crate::format::Format;
use crate::header::{Header, jpeg, probe};
use crate::limits::ImageLimits;
use image::codecs::gif::GifDecoder;
use image::codecs::jpeg::JpegDecoder;
use image::codecs::webp::WebPDecoder;
use image::{ColorType, DynamicImage, ImageDecoder, RgbImage};
use std::io::{Cursor, ErrorKind};

/// Pixels of a decoded image.
#[derive(Clone, PartialEq, Eq)]
pub struct Rgb8 {
    /// Red, green and blue of each pixel, row by row: `3 * width * height` bytes.
    pub pixels: Vec<u8>,
    /// Width in pixels.
    pub width: u32,
    /// Height in pixels.
    pub height: u32,
}

/// Decodes an image as transformers' processor does.
///
/// The EXIF orientation is applied. Alpha is blended over white in 8 bits: `(c a + 255 (255 - a)) / 255`, rounded. Grey
/// is repeated, palettes are expanded, CMYK is converted, and 16 bits are cut to the upper 8. Animations give their first
/// frame. A JPEG file without an end marker is refused, because decoders fill the missing part with grey.
///
/// The memory beyond the file is 3 bytes a pixel for most PNG and baseline JPEG files, 6 if they are rotated, and up to
/// 12 for progressive JPEG, WebP and GIF. The slowest file found within the default limits, a progressive JPEG of 90
/// scans, takes 2.7 s on one core.
///
/// # Errors
/// The errors of [`probe`], before anything is allocated; then [`ImageError::Truncated`], [`ImageError::Damaged`] and
/// [`ImageError::TooMuchMemory`].
pub fn decode(bytes: &[u8], limits: &ImageLimits) -> Result<Rgb8, ImageError> {
    decode_with(&probe(bytes, limits)?, bytes, limits)
}

/// Decodes an image with the header that [`probe`] found.
pub(crate) fn decode_with(header: &Header, bytes: &[u8], limits: &ImageLimits) -> Result<Rgb8, ImageError> {
    let reader = Cursor::new(bytes);
    let format = header.format;
    let failed = |error| convert_error(format, error);
    let pixels = match format {
        Format::Png => png::decode(header, bytes, limits)?,
        Format::Jpeg if !jpeg::is_complete(bytes) => return Err(ImageError::Truncated(format)),
        Format::Jpeg => read(header, JpegDecoder::new(reader).map_err(failed)?, limits)?,
        Format::WebP => read(header, WebPDecoder::new(reader).map_err(failed)?, limits)?,
        Format::Gif => read(header, GifDecoder::new(reader).map_err(failed)?, limits)?,
    };
    turn_upright(header, pixels)
}

/// The pixels of a decoder as RGB, as the file stores them.
fn read(header: &Header, mut decoder: impl ImageDecoder, limits: &ImageLimits) -> Result<Vec<u8>, ImageError> {
    let format = header.format;
    let failed = |error| convert_error(format, error);
    header.check_size(decoder.dimensions())?;
    let (width, height) = header.stored_size();
    let mut decoder_limits = image::Limits::default();
    decoder_limits.max_alloc = Some(limits.max_alloc(width, height));
    decoder.set_limits(decoder_limits).map_err(failed)?;
    let channels = match decoder.color_type() {
        ColorType::L8 => 1,
        ColorType::La8 => 2,
        ColorType::Rgb8 => 3,
        ColorType::Rgba8 => 4,
        other => return Err(ImageError::damaged(format, format!("pixels of type {other:?}"))),
    };
    let mut pixels = vec![0; width as usize * height as usize * channels];
    decoder.read_image(&mut pixels).map_err(failed)?;
    Ok(if channels == 3 { pixels } else { alpha::over_white(&pixels, channels) })
}

fn turn_upright(header: &Header, pixels: Vec<u8>) -> Result<Rgb8, ImageError> {
    let (width, height) = header.stored_size();
    let bytes = pixels.len();
    let stored = RgbImage::from_raw(width, height, pixels).ok_or(ImageError::Malformed { width, height, bytes })?;
    let mut image = DynamicImage::ImageRgb8(stored);
    image.apply_orientation(header.orientation);
    Ok(Rgb8 { pixels: image.into_rgb8().into_raw(), width: header.width, height: header.height })
}

fn convert_error(format: Format, error: image::ImageError) -> ImageError {
    match error {
        image::ImageError::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => ImageError::Truncated(format),
        image::ImageError::Limits(_) => ImageError::TooMuchMemory(format),
        error => ImageError::damaged(format, error.to_string()),
    }
}
