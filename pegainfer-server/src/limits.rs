//! Limits on requests, set by the operator. docs/operations/limits.md lists them all.

use crate::budget;
use clap::{Args, Command, FromArgMatches};
use pegainfer_core::images::MAX_TOKENS;
use pegainfer_images::ImageLimits;
use pegainfer_terminal::values::parse_bytes;
use std::num::{NonZeroU32, NonZeroUsize};

/// Flags that limit what requests may take.
#[derive(Debug, Clone, Args)]
pub struct Limits {
    /// Memory for all requests that are read, parsed and rendered; requests wait for their share. Large responses and
    /// unread output may take as much again
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = parse_inflight_bytes)]
    pub max_inflight_bytes: u64,
    /// Refuse request bodies that come at fewer bytes per second
    #[arg(long, value_name = "BYTES", default_value = "1K", value_parser = parse_bytes)]
    pub min_body_rate: u64,
    /// Close a connection if its client reads waiting output more slowly than this, on average over --client-timeout
    #[arg(long, value_name = "BYTES", default_value = "1K", value_parser = parse_bytes)]
    pub min_read_rate: u64,
    /// Refuse requests for larger responses: all choices with their tokens and log-probabilities
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = parse_bytes)]
    pub max_response_bytes: u64,
    /// Maximum number of open connections; beyond it, the longest idle ones are closed [default: 8192, fewer where the
    /// limit of open files (ulimit -n) is low]
    #[arg(long, value_name = "N")]
    pub max_connections: Option<NonZeroUsize>,
    /// Maximum number of running and queued requests (each choice counts) of one API key, or of one address without
    /// keys [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_requests_per_key: Option<NonZeroUsize>,
    /// Let requests choose their priority in the queue; without this flag they are refused
    #[arg(long)]
    pub allow_priority: bool,
    /// Share cached prefixes between API keys; one key can then find out what another one has sent
    #[arg(long)]
    pub share_prefix_cache: bool,
    /// Limits of images.
    #[command(flatten)]
    pub images: ImageFlags,
}

/// Flags that limit images, for models that read them.
#[derive(Debug, Clone, Args)]
pub struct ImageFlags {
    /// Maximum number of tokens of an image, at most 4096; larger images are scaled down
    #[arg(long, value_name = "TOKENS", default_value = "4096", value_parser = parse_image_tokens)]
    pub max_image_tokens: NonZeroU32,
    /// Maximum number of images of a request
    #[arg(long, value_name = "N", default_value = "64")]
    pub max_images: NonZeroUsize,
    /// Maximum size of an image's file
    #[arg(long, value_name = "BYTES", default_value = "20M", value_parser = parse_bytes)]
    pub max_image_bytes: u64,
    /// Maximum number of pixels of an image, width times height
    #[arg(long, value_name = "PIXELS", default_value = "67108864")]
    pub max_image_pixels: u64,
    /// Memory for the images of all open requests, half of it while they are decoded; requests wait for their share
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_bytes)]
    pub max_image_memory: u64,
}

impl ImageFlags {
    /// Limits of one image.
    pub fn of_image(&self) -> ImageLimits {
        ImageLimits {
            max_bytes: usize::try_from(self.max_image_bytes).unwrap_or(usize::MAX),
            max_pixels: self.max_image_pixels,
            ..ImageLimits::default()
        }
    }
}

impl Default for Limits {
    /// The defaults of the flags.
    fn default() -> Self {
        let matches = Self::augment_args(Command::new("limits")).get_matches_from([""]);
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

fn parse_image_tokens(text: &str) -> Result<NonZeroU32, String> {
    let tokens = text.parse().ok().filter(|tokens: &NonZeroU32| tokens.get() as usize <= MAX_TOKENS);
    tokens.ok_or_else(|| format!("{text} is not a number from 1 to {MAX_TOKENS}"))
}

fn parse_inflight_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    if bytes < budget::MIN_BYTES {
        return Err(format!("{text} is less than {} bytes, which no server can work with", budget::MIN_BYTES));
    }
    Ok(bytes)
}
