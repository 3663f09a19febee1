//! The out-tray of a machine: what it wants done, in order, for the shell to carry out after the event is handled.

/// Effects pushed while one event is handled. The shell drains it; machines only push.
#[derive(Debug)]
pub struct Effects<E> {
    items: Vec<E>,
}

impl<E> Default for Effects<E> {
    fn default() -> Self {
        Effects { items: Vec::new() }
    }
}

impl<E> Effects<E> {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn push(&mut self, effect: E) {
        self.items.push(effect);
    }

    pub fn drain(&mut self) -> std::vec::Drain<'_, E> {
        self.items.drain(..)
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    pub fn as_slice(&self) -> &[E] {
        &self.items
    }

    /// Takes all effects, leaving the tray empty (tests and the simulator).
    pub fn take(&mut self) -> Vec<E> {
        std::mem::take(&mut self.items)
    }
}
