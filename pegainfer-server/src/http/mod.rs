//! HTTP server around a router: connections, TLS, hosts, keys, origins, request ids, drain.

mod acceptor;
pub mod connections;
pub mod cors;
pub mod deadline;
pub mod error_shape;
mod followed_body;
mod forwarded;
pub mod guard;
mod half_close;
pub mod hosts;
mod http2;
mod keys;
mod open_connections;
mod open_files;
mod preface;
pub mod request_id;
mod rights;
mod secret_file;
mod server;
mod shares;
mod slot;
mod stall;
mod tls;

pub use connections::{Ports, serve};
pub use cors::Cors;
pub use forwarded::TrustedProxies;
pub use hosts::AllowedHosts;
pub use http2::MAX_STREAMS;
pub use keys::{ApiKeys, Secret};
pub use open_files::{OTHER_FILES, default_max_connections, max_open_files, raise_open_files};
pub use rights::Access;
pub use server::Server;
pub use tls::Tls;

/// Maximum number of pending connections in the listen queue.
pub const BACKLOG: u32 = 1024;
