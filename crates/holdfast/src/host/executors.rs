//! Threads that carry out what a machine wants: they choose nothing, and repeat nothing.

use anyhow::{Context, Result};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// So many of them take tasks from one queue, until its sender is gone.
pub(super) fn start<T: Send + 'static>(
    name: &str,
    count: usize,
    carry_out: impl Fn(T) + Clone + Send + 'static,
) -> Result<Sender<T>> {
    let (tasks, queue) = channel::<T>();
    let queue = Arc::new(Mutex::new(queue));
    for _ in 0..count {
        let (queue, carry_out) = (Arc::clone(&queue), carry_out.clone());
        let work = move || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok(task) = next else { return };
                carry_out(task);
            }
        };
        std::thread::Builder::new().name(name.to_string()).spawn(work).context("no thread to carry actions out")?;
    }
    Ok(tasks)
}
