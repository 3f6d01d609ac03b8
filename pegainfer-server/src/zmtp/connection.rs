//! A connection: its handshake, and messages in both directions.

use super::frame::{self, Frame, GREETING, invalid};
use std::io::{Error, ErrorKind, Result};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Maximum time for a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Maximum time for which a peer may read nothing of a message.
const WRITE: Duration = Duration::from_secs(30);
/// Maximum number of frames of a message that a peer may send.
const MAX_FRAMES: usize = 4;

/// Type of the socket on this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Publishes to sockets of type SUB.
    Publisher,
    /// Answers sockets of type DEALER and REQ.
    Router,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Publisher => "PUB",
            Self::Router => "ROUTER",
        }
    }

    fn takes(self, peer: &[u8]) -> bool {
        match self {
            Self::Publisher => [&b"SUB"[..], b"XSUB"].contains(&peer),
            Self::Router => [&b"DEALER"[..], b"REQ", b"ROUTER"].contains(&peer),
        }
    }
}

/// What a peer sends.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    /// All frames of a message.
    Message(Vec<Vec<u8>>),
    /// A subscription to messages that begin with this; also sent as a message by older peers.
    Subscribe(Vec<u8>),
    /// The end of one.
    Cancel(Vec<u8>),
    /// A test whether this side is alive; answer it with [`Connection::pong`].
    Ping(Vec<u8>),
}

/// A connection after its handshake.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    role: Role,
    /// Bytes that were read and are no complete frame yet.
    buffer: Vec<u8>,
    /// Frames of the message that is being read.
    frames: Vec<Vec<u8>>,
    /// True if the peer answers [`ping`](Self::ping).
    answers_pings: bool,
}

impl Connection {
    /// Greets the peer of a new connection.
    ///
    /// # Errors
    /// It speaks another protocol, is a socket of another type, or takes too long.
    pub async fn open(stream: TcpStream, role: Role) -> Result<Self> {
        timeout(HANDSHAKE, Self::handshake(stream, role)).await.map_err(|_| Error::from(ErrorKind::TimedOut))?
    }

    async fn handshake(mut stream: TcpStream, role: Role) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.write_all(&frame::greeting()).await?;
        let mut greeting = [0; GREETING];
        stream.read_exact(&mut greeting).await?;
        let answers_pings = frame::minor_version(&greeting)? >= 1;
        stream.write_all(&frame::ready(role.name())).await?;
        let mut connection = Self { stream, role, buffer: Vec::new(), frames: Vec::new(), answers_pings };
        match connection.frame().await? {
            Frame::Command { name, data } if name == b"READY" => {
                let peer = frame::socket_type(&data)?;
                if role.takes(&peer) { Ok(connection) } else { Err(invalid("the peer is a socket of another type")) }
            }
            Frame::Command { .. } | Frame::Message { .. } => Err(invalid("the peer does not begin with READY")),
        }
    }

    /// The next frame. Loses nothing if it is cancelled.
    async fn frame(&mut self) -> Result<Frame> {
        loop {
            if let Some(frame) = Frame::take(&mut self.buffer)? {
                return Ok(frame);
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// What the peer sends next. Loses nothing if it is cancelled.
    ///
    /// # Errors
    /// The connection is closed, or the peer breaks the protocol.
    pub async fn receive(&mut self) -> Result<Incoming> {
        loop {
            match self.frame().await? {
                Frame::Command { name, data } => match &name[..] {
                    b"SUBSCRIBE" => return Ok(Incoming::Subscribe(data)),
                    b"CANCEL" => return Ok(Incoming::Cancel(data)),
                    // Two bytes of it are a time to live.
                    b"PING" => return Ok(Incoming::Ping(data.get(2..).unwrap_or_default().to_vec())),
                    b"ERROR" => return Err(invalid("the peer reports an error")),
                    _ => {}
                },
                Frame::Message { more, body } => {
                    if self.frames.len() == MAX_FRAMES {
                        return Err(invalid("a message has too many frames"));
                    }
                    self.frames.push(body);
                    if !more {
                        return Ok(self.message());
                    }
                }
            }
        }
    }

    fn message(&mut self) -> Incoming {
        let mut frames = std::mem::take(&mut self.frames);
        match (self.role, &mut frames[..]) {
            (Role::Publisher, [only]) if only.first() == Some(&1) => Incoming::Subscribe(only.split_off(1)),
            (Role::Publisher, [only]) if only.first() == Some(&0) => Incoming::Cancel(only.split_off(1)),
            _ => Incoming::Message(frames),
        }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The connection is closed, or the peer reads nothing for a while.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<()> {
        // Small frames go together, a large one is not copied.
        let mut head = Vec::new();
        for (i, body) in frames.iter().enumerate() {
            frame::put_header(&mut head, i + 1 < frames.len(), body.len());
            if body.len() > 1024 {
                self.write(&head).await?;
                head.clear();
                self.write(body).await?;
            } else {
                head.extend(*body);
            }
        }
        self.write(&head).await
    }

    /// Answers a [`Ping`](Incoming::Ping).
    pub async fn pong(&mut self, context: &[u8]) -> Result<()> {
        // The protocol allows 16 bytes.
        self.write(&frame::command("PONG", &context[..context.len().min(16)])).await
    }

    /// Asks the peer for a sign of life, so that the system notices a connection that is gone. Peers before ZMTP 3.1
    /// are not asked, because some close the connection.
    pub async fn ping(&mut self) -> Result<()> {
        if self.answers_pings { self.write(&frame::command("PING", &[0, 0])).await } else { Ok(()) }
    }

    async fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let written = timeout(WRITE, self.stream.write(bytes)).await;
            match written.map_err(|_| Error::from(ErrorKind::TimedOut))?? {
                0 => return Err(ErrorKind::WriteZero.into()),
                written => bytes = &bytes[written..],
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    /// Both ends of a connection: this side's, and the raw stream of a peer after its greeting.
    async fn pair(role: Role, peer: &str) -> (Result<Connection>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        stream.write_all(&frame::greeting()).await.unwrap();
        stream.write_all(&frame::ready(peer)).await.unwrap();
        let connection = Connection::open(accepted, role).await;
        let mut head = vec![0; GREETING + frame::ready(role.name()).len()];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(head[..GREETING], frame::greeting());
        (connection, stream)
    }

    #[tokio::test]
    async fn subscriptions_come_as_commands_and_as_messages() {
        let (connection, mut peer) = pair(Role::Publisher, "SUB").await;
        let mut connection = connection.unwrap();
        peer.write_all(&frame::command("SUBSCRIBE", b"kv@")).await.unwrap();
        peer.write_all(&[0, 3, 1, b'k', b'v', 0, 1, 0]).await.unwrap();
        peer.write_all(&frame::command("CANCEL", b"kv@")).await.unwrap();
        peer.write_all(&frame::command("PING", &[0, 9, b'x'])).await.unwrap();
        for expected in [
            Incoming::Subscribe(b"kv@".to_vec()),
            Incoming::Subscribe(b"kv".to_vec()),
            Incoming::Cancel(Vec::new()),
            Incoming::Cancel(b"kv@".to_vec()),
            Incoming::Ping(b"x".to_vec()),
        ] {
            assert_eq!(connection.receive().await.unwrap(), expected);
        }
        connection.pong(b"x").await.unwrap();
        connection.send(&[b"topic", &[7; 2000], b""]).await.unwrap();
        let mut expected = frame::command("PONG", b"x");
        expected.extend(b"\x01\x05topic\x03\0\0\0\0\0\0\x07\xd0");
        expected.extend([7; 2000]);
        expected.extend([0, 0]);
        let mut bytes = vec![0; expected.len()];
        peer.read_exact(&mut bytes).await.unwrap();
        assert_eq!(bytes, expected);
    }

    #[tokio::test]
    async fn requests_have_several_frames() {
        let (connection, mut peer) = pair(Role::Router, "DEALER").await;
        let mut connection = connection.unwrap();
        peer.write_all(&[1, 0, 0, 2, b'h', b'i']).await.unwrap();
        assert_eq!(connection.receive().await.unwrap(), Incoming::Message(vec![Vec::new(), b"hi".to_vec()]));
        peer.write_all(&[1, 0].repeat(9)).await.unwrap();
        assert!(connection.receive().await.is_err(), "a message without an end");
    }

    #[tokio::test]
    async fn other_sockets_and_protocols_are_refused() {
        assert!(pair(Role::Publisher, "DEALER").await.0.is_err());
        assert!(pair(Role::Router, "SUB").await.0.is_err());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        stream.write_all(&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(3)).await.unwrap();
        let error = Connection::open(listener.accept().await.unwrap().0, Role::Publisher).await.unwrap_err();
        assert!(error.to_string().contains("ZMTP 3"), "{error}");
    }
}
