//! A cheap HTTP client: it reuses its connection, and searches for chunk boundaries instead of parsing JSON.

use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;
use std::time::Instant;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A connection that is reused for consecutive requests.
pub struct Connection {
    stream: TcpStream,
    response: Vec<u8>,
}

/// Times of a request.
pub struct Timing {
    /// Time just before the request was sent.
    pub sent: Instant,
    /// Arrival of the response's head and first token, which the server sends in one write.
    pub first: Instant,
}

impl Connection {
    /// Connects to the server.
    pub async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await.context("no connection")?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, response: Vec::new() })
    }

    /// Posts a JSON body and reads the whole response, which must have status 200.
    pub async fn post(&mut self, path: &str, body: &[u8]) -> Result<Timing> {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let request = [head.as_bytes(), body].concat();
        let sent = Instant::now();
        self.stream.write_all(&request).await?;
        self.response.clear();
        self.read().await?;
        let first = Instant::now();
        while !self.is_complete() {
            self.read().await?;
        }
        let start = &self.response[..self.response.len().min(300)];
        ensure!(start.starts_with(b"HTTP/1.1 200"), "the server responded {}", String::from_utf8_lossy(start));
        Ok(Timing { sent, first })
    }

    /// Number of chunks of the last response, without the final `[DONE]`.
    pub fn chunks(&self) -> usize {
        self.response.windows(7).filter(|window| window == b"data: {").count()
    }

    async fn read(&mut self) -> Result<()> {
        let read = self.stream.read_buf(&mut self.response).await?;
        ensure!(read > 0, "the connection was closed");
        Ok(())
    }

    fn is_complete(&self) -> bool {
        if self.response.ends_with(b"\r\n0\r\n\r\n") {
            return true;
        }
        let Some(head) = self.response.windows(4).take(1000).position(|window| window == b"\r\n\r\n") else {
            return false;
        };
        let lines = String::from_utf8_lossy(&self.response[..head]).to_ascii_lowercase();
        let length = lines.lines().find_map(|line| line.strip_prefix("content-length: "));
        length.and_then(|length| length.parse().ok()) == Some(self.response.len() - head - 4)
    }
}
