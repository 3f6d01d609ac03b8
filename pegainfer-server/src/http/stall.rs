//! Write timeout: closes a connection whose client reads too slowly while output waits for it.

use crate::output::Outbox;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Minimum rate at which a client reads its output.
#[derive(Debug, Clone, Copy)]
pub struct ReadLimits {
    /// Time over which the rate is measured. A client that reads nothing for this long is gone.
    pub window: Duration,
    /// Bytes per second.
    pub min_rate: u64,
}

/// Counts the bytes that the socket writes, and fails a write if the client is too slow. The rate is measured from the
/// first write that has to wait until no output waits, so a client that has read everything may wait for the model.
/// Without the limit, a client that reads a byte now and then would hold its connection and its unread output forever.
pub struct StallGuard<S> {
    inner: S,
    limits: ReadLimits,
    outbox: Arc<Outbox>,
    /// `Some` while output waits for the client.
    window: Option<Window>,
}

/// A time window with a minimum number of bytes to read.
struct Window {
    began: Instant,
    /// Bytes that the socket had written when the window began.
    written: u64,
    end: Pin<Box<Sleep>>,
}

impl<S> StallGuard<S> {
    /// Wraps the `inner` socket of the connection with this outbox.
    pub fn new(inner: S, limits: ReadLimits, outbox: Arc<Outbox>) -> Self {
        Self { inner, limits, outbox, window: None }
    }

    fn watch(&mut self, cx: &mut Context<'_>, progress: Poll<Result<usize>>) -> Poll<Result<usize>> {
        match progress {
            Poll::Pending => self.check(cx),
            Poll::Ready(Ok(bytes)) => {
                self.outbox.wrote(bytes);
                if self.window.is_some() && self.outbox.unread().bytes == 0 {
                    self.window = None;
                }
                progress
            }
            Poll::Ready(Err(_)) => progress,
        }
    }

    /// Handles a write that has to wait: fails if the client was too slow.
    fn check(&mut self, cx: &mut Context<'_>) -> Poll<Result<usize>> {
        loop {
            let (limits, written) = (self.limits, self.outbox.written());
            let window = self.window.get_or_insert_with(|| {
                let began = Instant::now();
                Window { began, written, end: Box::pin(sleep_until(began + limits.window)) }
            });
            if window.end.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let min_bytes = limits.min_rate as f64 * window.began.elapsed().as_secs_f64();
            if ((written - window.written) as f64) < min_bytes.max(1.0) {
                let message = "the client reads its output too slowly (--min-read-rate)";
                return Poll::Ready(Err(Error::new(ErrorKind::TimedOut, message)));
            }
            self.window = None;
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let progress = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.watch(cx, progress)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let progress = Pin::new(&mut self.inner).poll_write_vectored(cx, parts);
        self.watch(cx, progress)
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::{sleep, timeout};

    const MS: Duration = Duration::from_millis(1);
    /// 100 bytes in each window.
    const LIMITS: ReadLimits = ReadLimits { window: Duration::from_millis(100), min_rate: 1000 };

    /// A connection with `bytes` bytes to send through a buffer of 1,000, and its client.
    fn connection(bytes: usize) -> (StallGuard<DuplexStream>, Arc<Outbox>, DuplexStream) {
        let (server, client) = duplex(1000);
        let outbox = Arc::new(Outbox::default());
        outbox.add_chunk(bytes);
        (StallGuard::new(server, LIMITS, outbox.clone()), outbox, client)
    }

    /// Sends 20,000 bytes to a client that reads `bytes` bytes every 20 ms. Returns the time taken and whether all were
    /// sent.
    async fn send_to(bytes: usize) -> (Duration, bool) {
        let (mut guard, _, mut client) = connection(20_000);
        let reader = tokio::spawn(async move {
            let mut some = vec![0; bytes];
            while client.read_exact(&mut some).await.is_ok() {
                sleep(20 * MS).await;
            }
        });
        let began = Instant::now();
        let sent = timeout(Duration::from_secs(20), guard.write_all(&[0; 20_000])).await;
        reader.abort();
        (began.elapsed(), sent.expect("it ends").is_ok())
    }

    #[tokio::test]
    async fn a_client_reads_at_the_least_rate_while_output_waits() {
        let (took, sent) = send_to(1).await;
        assert!(!sent && took >= LIMITS.window, "a byte now and then is no progress: {took:?}");
        assert!(!send_to(15).await.1, "three quarters of the rate");
        let (took, sent) = send_to(1000).await;
        assert!(sent && took > 3 * LIMITS.window, "slow is not dead: {took:?}");
    }

    #[tokio::test]
    async fn a_client_that_takes_all_there_is_may_wait_for_the_model() {
        let (mut guard, outbox, mut client) = connection(1500);
        assert!(timeout(10 * MS, guard.write_all(&[0; 1500])).await.is_err(), "it does not fit");
        let mut all = vec![0; 1500];
        client.read_exact(&mut all[..1000]).await.unwrap();
        guard.write_all(&[0; 500]).await.unwrap();
        client.read_exact(&mut all[..500]).await.unwrap();
        sleep(3 * LIMITS.window).await;
        outbox.add_chunk(1200);
        assert!(timeout(MS, guard.write_all(&[0; 1200])).await.is_err(), "a new window begins");
        let error = guard.write_all(&[0; 1200]).await.unwrap_err();
        assert!(error.to_string().contains("--min-read-rate"), "{error}");
    }
}
