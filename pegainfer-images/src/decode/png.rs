//! PNG, row by row: text and colour profiles, which may inflate to hundreds of MiB, are skipped.

use super::alpha::{over_white, write_over_white};
use crate::error::ImageError;
use crate::format::Format;
use crate::header::Header;
use crate::limits::ImageLimits;
use png::{BitDepth, Decoder, DecodingError, Limits, Reader, Transformations};
use std::io::{Cursor, ErrorKind};

/// The pixels as RGB over white, as the file stores them.
pub(super) fn decode(header: &Header, bytes: &[u8], limits: &ImageLimits) -> Result<Vec<u8>, ImageError> {
    let (width, height) = header.stored_size();
    let max_alloc = usize::try_from(limits.max_alloc(width, height)).unwrap_or(usize::MAX);
    let mut decoder = Decoder::new_with_limits(Cursor::new(bytes), Limits { bytes: max_alloc });
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    // 1, 2 and 4 bits, palettes and transparent colours are expanded; of 16 bits the upper 8 stay.
    decoder.set_transformations(Transformations::EXPAND | Transformations::STRIP_16);
    let mut reader = decoder.read_info().map_err(convert_error)?;
    header.check_size(reader.info().size())?;
    let (color, depth) = reader.output_color_type();
    if depth != BitDepth::Eight {
        return Err(ImageError::damaged(Format::Png, format!("samples of {depth:?} bits")));
    }
    let channels = color.samples();
    if reader.info().interlaced {
        return read_interlaced(&mut reader, channels);
    }
    let mut rgb = vec![0; width as usize * height as usize * 3];
    let mut row = vec![0; width as usize * channels];
    for out in rgb.chunks_exact_mut(width as usize * 3) {
        reader.read_row(&mut row).map_err(convert_error)?.ok_or(ImageError::Truncated(Format::Png))?;
        write_over_white(&row, channels, out);
    }
    // Reads the rest of the data, whose checksum comes last.
    reader.read_row(&mut row).map_err(convert_error)?;
    Ok(rgb)
}

/// The pixels of an interlaced image, which is complete only after its last pass.
fn read_interlaced(reader: &mut Reader<Cursor<&[u8]>>, channels: usize) -> Result<Vec<u8>, ImageError> {
    let bytes = reader.output_buffer_size().ok_or(ImageError::TooMuchMemory(Format::Png))?;
    let mut pixels = vec![0; bytes];
    reader.next_frame(&mut pixels).map_err(convert_error)?;
    Ok(if channels == 3 { pixels } else { over_white(&pixels, channels) })
}

fn convert_error(error: DecodingError) -> ImageError {
    match error {
        DecodingError::IoError(error) if error.kind() == ErrorKind::UnexpectedEof => ImageError::Truncated(Format::Png),
        DecodingError::LimitsExceeded => ImageError::TooMuchMemory(Format::Png),
        error => ImageError::damaged(Format::Png, error.to_string()),
    }
}
