//! A client that costs little: it keeps its connection, and looks for token boundaries instead of parsing JSON.

use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A connection that is used for one request after the other.
pub struct Connection {
    stream: TcpStream,
    answer: Vec<u8>,
}

/// What a request took.
pub struct Timing {
    /// Just before the request was sent.
    pub sent: Instant,
    /// When the head of the answer and the first token arrived, which is one write of the server.
    pub first: Instant,
}

impl Connection {
    /// Connects.
    pub async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await.context("no connection")?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, answer: Vec::new() })
    }

    /// Posts a body of JSON and reads the whole answer, which must be a success.
    pub async fn post(&mut self, path: &str, body: &[u8]) -> Result<Timing> {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let request = [head.as_bytes(), body].concat();
        let sent = Instant::now();
        self.stream.write_all(&request).await?;
        self.answer.clear();
        self.read().await?;
        let first = Instant::now();
        while !self.is_complete() {
            self.read().await?;
        }
        let start = &self.answer[..self.answer.len().min(300)];
        ensure!(start.starts_with(b"HTTP/1.1 200"), "the server answered {}", String::from_utf8_lossy(start));
        Ok(Timing { sent, first })
    }

    /// Chunks of the last answer, without the final `[DONE]`.
    pub fn chunks(&self) -> usize {
        self.answer.windows(7).filter(|window| window == b"data: {").count()
    }

    async fn read(&mut self) -> Result<()> {
        let read = self.stream.read_buf(&mut self.answer).await?;
        ensure!(read > 0, "the connection was closed");
        Ok(())
    }

    fn is_complete(&self) -> bool {
        if self.answer.ends_with(b"\r\n0\r\n\r\n") {
            return true;
        }
        let Some(head) = self.answer.windows(4).take(1000).position(|window| window == b"\r\n\r\n") else {
            return false;
        };
        let lines = String::from_utf8_lossy(&self.answer[..head]).to_ascii_lowercase();
        let length = lines.lines().find_map(|line| line.strip_prefix("content-length: "));
        length.and_then(|length| length.parse().ok()) == Some(self.answer.len() - head - 4)
    }
}
