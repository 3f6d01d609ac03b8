//! The size to which an image is scaled, by its own size and the areas that model, server and request allow.

use crate::error::ImageError;
use std::str::FromStr;

/// Side of a patch in pixels.
pub const PATCH: u32 = 16;

/// Side of one token's block of 2 x 2 patches in pixels; sides of a [`Picture`](crate::Picture) are multiples of it.
pub const FACTOR: u32 = 2 * PATCH;

/// Maximum ratio of the sides of an image; exactly this ratio is served.
pub const MAX_RATIO: u32 = 200;

/// Pixels of one token.
pub(crate) const TOKEN_AREA: u64 = (FACTOR * FACTOR) as u64;

/// Pixels of an image with `detail: low`: 256 tokens.
const LOW_AREA: u64 = 256 * TOKEN_AREA;

/// Width and height of the scaled image, the rule `smart_resize` of transformers. All computations are in f64.
///
/// With f = 32, each side is `round(side / f) f`, ties to even. If the area is then above `max_area`, a side is
/// `max(f, floor(side / b / f) f)` with `b = sqrt(width height / max_area)`. If it is below `min_area`, a side is
/// `ceil(side b / f) f` with `b = sqrt(min_area / (width height))`. Areas are in pixels. Long images may exceed both.
///
/// # Errors
/// [`ImageError::TooNarrow`] if a side is more than [`MAX_RATIO`] times the other, or 0.
pub fn smart_resize(width: u32, height: u32, min_area: u64, max_area: u64) -> Result<(u32, u32), ImageError> {
    let (short, long) = (width.min(height), width.max(height));
    if short == 0 || u64::from(long) > u64::from(MAX_RATIO) * u64::from(short) {
        return Err(ImageError::TooNarrow { width, height });
    }
    let f = f64::from(FACTOR);
    let area = f64::from(width) * f64::from(height);
    let scale = |rule: &dyn Fn(f64) -> f64| (rule(width.into()) * f, rule(height.into()) * f);
    let mut sides = scale(&|side| (side / f).round_ties_even());
    if sides.0 * sides.1 > max_area as f64 {
        let b = (area / max_area as f64).sqrt();
        sides = scale(&|side| (side / b / f).floor().max(1.0));
    } else if sides.0 * sides.1 < min_area as f64 {
        let b = (min_area as f64 / area).sqrt();
        sides = scale(&|side| (side * b / f).ceil());
    }
    // A cast of f64 saturates; sides above u32 need an area above 2^59.
    Ok((sides.0 as u32, sides.1 as u32))
}

/// `detail` of an image in OpenAI's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// At most 256 tokens.
    Low,
    /// As the server's limit allows.
    #[default]
    Auto,
    /// The same as [`Detail::Auto`].
    High,
    /// As the model allows, if the server does, too; else the same as [`Detail::Auto`].
    Original,
}

impl FromStr for Detail {
    type Err = ImageError;

    fn from_str(text: &str) -> Result<Self, ImageError> {
        match text {
            "low" => Ok(Self::Low),
            "auto" => Ok(Self::Auto),
            "high" => Ok(Self::High),
            "original" => Ok(Self::Original),
            _ => Err(ImageError::UnknownDetail(text.chars().take(40).collect())),
        }
    }
}

/// The resolution that a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resolution {
    /// Level of detail.
    pub detail: Detail,
    /// Minimum area after scaling in pixels, instead of the model's.
    pub min_pixels: Option<u64>,
    /// Maximum area after scaling in pixels; the server's limit holds as well.
    pub max_pixels: Option<u64>,
}

/// Areas after scaling that model and server allow, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Areas {
    /// Minimum.
    pub(crate) min: u64,
    /// Maximum of the server, at most that of the model.
    pub(crate) max: u64,
    /// Maximum for [`Detail::Original`].
    pub(crate) original: u64,
}

impl Areas {
    /// Width and height of the scaled image. Its area is at most the maximum, which a long image exceeds under
    /// [`smart_resize`] alone if the maximum is below 204,800: then the long side is cut.
    pub(crate) fn size(&self, width: u32, height: u32, resolution: &Resolution) -> Result<(u32, u32), ImageError> {
        let (min, max) = self.of_request(resolution)?;
        let (w, h) = smart_resize(width, height, min, max)?;
        if u64::from(w) * u64::from(h) <= max {
            return Ok((w, h));
        }
        let short = u64::from(w.min(h)).min(max / u64::from(FACTOR) / u64::from(FACTOR) * u64::from(FACTOR));
        let long = (max / short / u64::from(FACTOR) * u64::from(FACTOR)) as u32;
        Ok(if w > h { (long, short as u32) } else { (short as u32, long) })
    }

    /// Minimum and maximum area for a request.
    fn of_request(&self, resolution: &Resolution) -> Result<(u64, u64), ImageError> {
        let cap = match resolution.detail {
            Detail::Low => self.max.min(LOW_AREA),
            Detail::Auto | Detail::High => self.max,
            Detail::Original => self.original,
        };
        let max = resolution.max_pixels.map_or(cap, |max| max.min(cap));
        if max < TOKEN_AREA {
            return Err(ImageError::MaxPixels { max, least: TOKEN_AREA });
        }
        match resolution.min_pixels {
            Some(min) if min > max => Err(ImageError::MinPixels { min, max }),
            Some(min) => Ok((min, max)),
            None => Ok((self.min.min(max), max)),
        }
    }
}
