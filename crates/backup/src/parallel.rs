//! Work on several objects at a time.

use crate::Result;

/// Objects at a time: stores take their time, and cores compress and check.
pub const WORKERS: usize = 8;

/// Each item is worked on, [`WORKERS`] at a time; outcomes are taken in order. The first error ends it.
///
/// # Errors
/// Of `take`.
pub fn in_order<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> R + Sync,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<()> {
    let mut items = items.into_iter();
    loop {
        let batch: Vec<T> = items.by_ref().take(WORKERS).collect();
        if batch.is_empty() {
            return Ok(());
        }
        let outcomes: Vec<R> = std::thread::scope(|scope| {
            let work = &work;
            let running: Vec<_> = batch.into_iter().map(|item| scope.spawn(move || work(item))).collect();
            running.into_iter().map(|one| one.join().expect("no worker panics")).collect()
        });
        outcomes.into_iter().try_for_each(&mut take)?;
    }
}
