//! cuBLASLt of an [`Exec`], opened by a separate thread.

use super::{BlasLt, Place};
use pegainfer_core::exec::Exec;
use std::thread::{Builder, JoinHandle};

/// The library, open or being opened.
pub(super) struct State {
    /// The thread that opens the library, until the first use.
    opening: Option<JoinHandle<Result<BlasLt, String>>>,
    /// The library, or the reason why there is none.
    blaslt: Result<BlasLt, String>,
}

impl State {
    /// Starts opening the library, which takes a quarter of a second.
    pub(super) fn begin(exec: &mut Exec) -> Self {
        let missing = |why: String| Self { opening: None, blaslt: Err(why) };
        let (info, place) = match Place::current(exec).and_then(|place| Ok((exec.gpu()?.info()?, place))) {
            Ok(gpu) => gpu,
            Err(error) => return missing(error.to_string()),
        };
        let open = move || BlasLt::open(&info, place);
        match Builder::new().name("cublaslt".to_owned()).spawn(open) {
            Ok(opening) => Self { opening: Some(opening), blaslt: Err("cuBLASLt is not open yet".to_owned()) },
            Err(error) => missing(format!("the thread for cuBLASLt cannot be started: {error}")),
        }
    }

    /// Waits for the thread that opens the library.
    pub(super) fn opened(&mut self) -> Result<&mut BlasLt, &str> {
        if let Some(opening) = self.opening.take() {
            self.blaslt = opening.join().unwrap_or_else(|_| Err("opening cuBLASLt panicked".to_owned()));
            match &self.blaslt {
                Ok(blaslt) => log::debug!("cuBLASLt {} ({})", blaslt.library.version(), blaslt.library.path.display()),
                Err(why) => log::warn!("large-M GEMMs will be slow: {why}"),
            }
        }
        self.blaslt.as_mut().map_err(|why| why.as_str())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if let Some(opening) = self.opening.take() {
            drop(opening.join());
        }
    }
}
