//! Images of requests, from the bytes of a file to the pixels that a vision tower reads.
//!
//! Serves Qwen3.5 and its successors: patches of 16 x 16 pixels, blocks of 2 x 2 patches, one token for each block. The
//! pixels of PNG, GIF and lossless WebP files equal those of the processor in transformers; decoders of lossy files differ
//! by a few levels. Images are hostile input: headers are checked against [`ImageLimits`] before anything is allocated,
//! and sizes in headers bound the memory of decoders.
//!
//! # Layout
//! - `limits`: [`ImageLimits`]. `error`: [`ImageError`] of a request, [`ConfigError`] of a model.
//! - `data_url`: [`from_data_url`] and [`from_base64`].
//! - `format`, `magic`: [`Format`], by the first bytes. `header`: [`probe`], size and orientation without decoding.
//! - `decode`: [`decode`], upright RGB over white.
//! - `size`: [`smart_resize`], and the resolution that a request asks for. `resize`: [`resize`], exact.
//! - `config`: preprocessor_config.json. `processor`: [`ImageProcessor`], all steps in order. `picture`: [`Picture`], their
//!   result.
//!
//! # Example
//! ```
//! use pegainfer_images::{ImageLimits, ImageProcessor, Resolution, from_data_url, probe};
//!
//! let url = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4\
//!     DwABAQEAsTj2FAAAAABJRU5ErkJggg==";
//! let (limits, resolution) = (ImageLimits::default(), Resolution::default());
//! let processor = ImageProcessor::default();
//! let bytes = from_data_url(url, &limits)?;
//! assert_eq!(processor.tokens(&probe(&bytes, &limits)?, &resolution)?, 64);
//! let picture = processor.process(&bytes, &limits, &resolution)?;
//! assert_eq!((picture.width(), picture.height(), picture.grid()), (256, 256, (16, 16)));
//! # Ok::<(), pegainfer_images::ImageError>(())
//! ```

mod config;
mod data_url;
mod decode;
mod error;
mod format;
mod header;
mod limits;
mod magic;
mod picture;
mod processor;
mod resize;
mod size;

pub use data_url::{from_base64, from_data_url};
pub use decode::{Rgb8, decode};
pub use error::{ConfigError, ImageError};
pub use format::Format;
pub use header::{Header, probe};
pub use limits::ImageLimits;
pub use picture::Picture;
pub use processor::ImageProcessor;
pub use resize::resize;
pub use size::{Detail, FACTOR, MAX_RATIO, PATCH, Resolution, smart_resize};
