//! The OpenAI-compatible server and command line, as a library, so that tests can start the real router.

#[cfg(test)]
mod testing;
pub mod text;
