//! The first bytes of a connection with HTTP/2, which have to come in time.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::time::timeout;

/// What a client of HTTP/2 sends first (RFC 9113, section 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Reads the preface from a client. Fails if it sends something else, or not in time.
pub(super) async fn expect_preface(stream: &mut (impl AsyncRead + Unpin), limit: Duration) -> Result<()> {
    let mut sent = [0; PREFACE.len()];
    let late = || Error::new(ErrorKind::TimedOut, "nothing came in time");
    timeout(limit, stream.read_exact(&mut sent)).await.map_err(|_| late())??;
    if sent != *PREFACE {
        return Err(Error::new(ErrorKind::InvalidData, "it speaks another protocol"));
    }
    Ok(())
}

/// A socket with the preface in front, after [`expect_preface`] has read it.
pub(super) struct AfterPreface<S> {
    inner: S,
    /// Rest of the preface.
    preface: &'static [u8],
}

impl<S> AfterPreface<S> {
    /// The socket after the preface.
    pub fn new(inner: S) -> Self {
        Self { inner, preface: PREFACE }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AfterPreface<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        if self.preface.is_empty() {
            return Pin::new(&mut self.inner).poll_read(cx, buffer);
        }
        let (now, rest) = self.preface.split_at(buffer.remaining().min(self.preface.len()));
        buffer.put_slice(now);
        self.preface = rest;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AfterPreface<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test]
    async fn the_preface_is_read_in_time_and_given_on() {
        let limit = Duration::from_millis(50);
        let (mut server, mut client) = tokio::io::duplex(100);
        client.write_all(PREFACE).await.unwrap();
        client.write_all(b"rest").await.unwrap();
        drop(client);
        expect_preface(&mut server, limit).await.unwrap();
        let mut all = Vec::new();
        AfterPreface::new(server).read_to_end(&mut all).await.unwrap();
        assert_eq!(all, [&PREFACE[..], b"rest"].concat());
        for sent in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], b"PRI * HTTP"] {
            let (mut server, mut client) = tokio::io::duplex(100);
            client.write_all(sent).await.unwrap();
            assert!(expect_preface(&mut server, limit).await.is_err());
        }
    }
}
