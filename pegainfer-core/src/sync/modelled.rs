//! Channels built from loom's locks, with the methods of std's and tokio's.

use loom::sync::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::fmt;
use std::sync::mpsc::{RecvError, RecvTimeoutError, SendError, TryRecvError, TrySendError};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

struct Channel<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    capacity: usize,
}

struct State<T> {
    messages: VecDeque<T>,
    senders: usize,
    /// True while there is a receiver.
    received: bool,
}

impl<T> Channel<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change.
    fn wait<'a>(&self, state: MutexGuard<'a, State<T>>) -> MutexGuard<'a, State<T>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends; clones send to the same receiver.
pub struct Sender<T>(Arc<Channel<T>>);

/// Receives messages in the order in which they were sent.
pub struct Receiver<T>(Arc<Channel<T>>);

/// A channel for `capacity` messages.
pub fn sync_channel<T>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    let state = State { messages: VecDeque::new(), senders: 1, received: true };
    let channel = Arc::new(Channel { state: Mutex::new(state), changed: Condvar::new(), capacity });
    (Sender(channel.clone()), Receiver(channel))
}

/// A channel for any number of messages.
pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
    sync_channel(usize::MAX)
}

impl<T> Sender<T> {
    /// Sends once there is capacity.
    pub fn send(&self, message: T) -> Result<(), SendError<T>> {
        let mut state = self.0.state();
        while state.received && state.messages.len() == self.0.capacity {
            state = self.0.wait(state);
        }
        if !state.received {
            return Err(SendError(message));
        }
        state.messages.push_back(message);
        drop(state);
        self.0.changed.notify_all();
        Ok(())
    }

    /// Sends if there is capacity.
    pub fn try_send(&self, message: T) -> Result<(), TrySendError<T>> {
        let mut state = self.0.state();
        if !state.received {
            return Err(TrySendError::Disconnected(message));
        }
        if state.messages.len() == self.0.capacity {
            return Err(TrySendError::Full(message));
        }
        state.messages.push_back(message);
        drop(state);
        self.0.changed.notify_all();
        Ok(())
    }
}

impl<T> Receiver<T> {
    /// Receives the next message; waits for it.
    pub fn recv(&self) -> Result<T, RecvError> {
        let mut state = self.0.state();
        loop {
            if let Some(message) = state.messages.pop_front() {
                drop(state);
                self.0.changed.notify_all();
                return Ok(message);
            }
            if state.senders == 0 {
                return Err(RecvError);
            }
            state = self.0.wait(state);
        }
    }

    /// Receives the next message if there is one.
    pub fn try_recv(&self) -> Result<T, TryRecvError> {
        let mut state = self.0.state();
        let gone = state.senders == 0;
        let message = state.messages.pop_front();
        drop(state);
        self.0.changed.notify_all();
        message.ok_or(if gone { TryRecvError::Disconnected } else { TryRecvError::Empty })
    }

    /// Same as [`recv`](Self::recv): no time passes in a model.
    pub fn recv_timeout(&self, _limit: Duration) -> Result<T, RecvTimeoutError> {
        self.recv().map_err(|RecvError| RecvTimeoutError::Disconnected)
    }
}

/// The receiver of a channel of tokio.
pub struct AsyncReceiver<T>(Receiver<T>);

/// A channel of tokio for `capacity` messages.
pub fn async_channel<T>(capacity: usize) -> (Sender<T>, AsyncReceiver<T>) {
    let (sender, receiver) = sync_channel(capacity);
    (sender, AsyncReceiver(receiver))
}

impl<T> AsyncReceiver<T> {
    /// The next message; `None` if there will be none. In a model each client has its own thread and may block it.
    pub async fn recv(&mut self) -> Option<T> {
        self.blocking_recv()
    }

    /// Blocking variant of [`recv`](Self::recv), for threads without an async runtime.
    pub fn blocking_recv(&mut self) -> Option<T> {
        self.0.recv().ok()
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        self.0.state().senders += 1;
        Self(self.0.clone())
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state().senders -= 1;
        self.0.changed.notify_all();
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.received = false;
        let unread = std::mem::take(&mut state.messages);
        drop(state);
        // Messages have senders of their own.
        drop(unread);
        self.0.changed.notify_all();
    }
}

impl<T> fmt::Debug for AsyncReceiver<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AsyncReceiver")
    }
}
