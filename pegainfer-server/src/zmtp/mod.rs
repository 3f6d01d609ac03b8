//! The part of ZeroMQ that a publisher needs: ZMTP 3.1 over TCP without authentication (mechanism NULL), for sockets of
//! type PUB and ROUTER. The protocol is <https://rfc.zeromq.org/spec/37/>.
//!
//! A library would queue messages for each subscriber, up to a number of messages of any size. Here the caller has one
//! queue, and a connection only reads and writes, so memory is bounded whoever connects.

mod connection;
mod endpoint;
mod frame;

pub use connection::{Connection, Incoming, Role};
pub use endpoint::{Endpoint, EndpointError};
