//! The vision tower: a vision transformer that turns the patches of an image into rows that replace the embeddings of
//! its tokens.
//!
//! Patches are embedded, get a learned position, and go through blocks of bidirectional attention and an MLP; the
//! merger joins 2 x 2 patches into one row of the text model's width. Source: `Qwen3_5VisionModel` of transformers.
//! Activations are bf16, or f32 to compare the arithmetic with a reference.
//!
//! - [`config`]: `vision_config` of config.json. [`weights`]: `model.visual.*`.
//! - [`layout`]: places and positions of patches. [`tower`]: the forward pass. [`rows`]: encoded images.

pub mod config;
pub mod layout;
pub mod rows;
pub mod tower;
pub mod weights;
