//! Images in conversations, whichever API they came through.
//!
//! # Layout
//! - [`part`]: an image as a request has it, and what models of text read instead.
//! - [`files`]: the files of the images and their places in the prompt; nothing is decoded yet.
//! - [`fetch`]: a client for the hosts that images may be fetched from; [`remote`]: a request's images on them.
//! - [`pictures`]: decoded and scaled images; [`recent`]: those of recent requests. [`memory`]: threads and memory for
//!   those of all requests.

mod fetch;
mod files;
mod memory;
mod part;
mod pictures;
mod recent;
mod remote;

pub use fetch::ImageFetcher;
pub use files::{ImageFiles, ImagePixels, Sources};
pub use memory::ImageMemory;
pub use part::{ImagePart, ImageSource, Unread, invalid};
pub use pictures::Pictures;
