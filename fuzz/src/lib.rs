//! Fuzzing: each target is a function that takes bytes and panics if its property does not hold.
//!
//! With cargo-fuzz, guided by coverage: `cargo +nightly fuzz run requests --features libfuzzer`. Without it, on any
//! compiler: `cargo run --release -p pegainfer-fuzz -- requests --seconds 60` mutates the same seeds blindly.
//!
//! # Layout
//! - [`requests`]: bodies of every endpoint, against the real router. [`conversations`]: rendering of chat templates.
//! - [`outputs`], [`calls`]: model outputs, against the reasoning and tool parsers. [`agents`]: bodies of the Responses
//!   and Messages APIs.
//! - [`grammars`]: sources of structured output, and texts that follow them. [`hub`]: responses to the downloader.
//! - [`gguf`]: headers of GGUF files. [`grpc`]: messages of the gRPC services. [`images`]: files of images. [`image_parts`]:
//!   images in requests.
//! - [`queues`]: requests of several tenants before they reach the engine.
//! - [`server`]: the router over an engine that repeats its prompt. [`mutate`]: the blind mutations.

pub mod agents;
pub mod calls;
pub mod conversations;
pub mod gguf;
pub mod grammars;
pub mod grpc;
pub mod hub;
pub mod image_parts;
pub mod images;
pub mod mutate;
pub mod outputs;
pub mod queues;
pub mod requests;
pub mod server;

/// A property, and inputs that reach its code.
pub struct FuzzTarget {
    /// Name on the command line.
    pub name: &'static str,
    /// Panics if the property does not hold.
    pub check: fn(&[u8]),
    /// Seed inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: [FuzzTarget; 13] = [
    FuzzTarget { name: "requests", check: requests::check, seeds: requests::seeds },
    FuzzTarget { name: "conversations", check: conversations::check, seeds: conversations::seeds },
    FuzzTarget { name: "outputs", check: outputs::check, seeds: outputs::seeds },
    FuzzTarget { name: "calls", check: calls::check, seeds: calls::seeds },
    FuzzTarget { name: "responses", check: agents::check_responses, seeds: agents::seeds_of_responses },
    FuzzTarget { name: "messages", check: agents::check_messages, seeds: agents::seeds_of_messages },
    FuzzTarget { name: "grammars", check: grammars::check, seeds: grammars::seeds },
    FuzzTarget { name: "gguf", check: gguf::check, seeds: gguf::seeds },
    FuzzTarget { name: "grpc", check: grpc::check, seeds: grpc::seeds },
    FuzzTarget { name: "hub", check: hub::check, seeds: hub::seeds },
    FuzzTarget { name: "images", check: images::check, seeds: images::seeds },
    FuzzTarget { name: "image_parts", check: image_parts::check, seeds: image_parts::seeds },
    FuzzTarget { name: "queues", check: queues::check, seeds: queues::seeds },
];
