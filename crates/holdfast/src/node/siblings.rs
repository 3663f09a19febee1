//! What the reactors of a node say to each other.
//!
//! Invariant: it is heard in the order in which it was said. What another has no room for just now waits here.

use super::devices::NodeDevice;
use super::shell::Joining;
use holdfast_runtime::mailbox::{Full, Sender};
use holdfast_store::Message;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

/// What a reactor is told.
pub enum Post {
    /// By the machine of another.
    Told {
        reactor: u16,
        message: Message,
    },
    /// A connection that is for devices of this one.
    Joining(Box<Joining>),
    /// It has these devices from here on.
    Devices(Vec<NodeDevice>),
    /// The devices that another had at the start are open, or out.
    Opened {
        reactor: u16,
    },
    Stop,
}

/// One of a node's reactors, and the others as it sees them.
pub struct Own {
    number: usize,
    count: usize,
    posts: Arc<OnceLock<Vec<Sender<Post>>>>,
    /// What each has no room for, or has not begun to hear.
    unsaid: Vec<VecDeque<Post>>,
}

impl Own {
    pub fn new(number: usize, count: usize, posts: Arc<OnceLock<Vec<Sender<Post>>>>) -> Own {
        Own { number, count, posts, unsaid: (0..count).map(|_| VecDeque::new()).collect() }
    }

    pub fn number(&self) -> u16 {
        self.number as u16
    }

    pub fn is_front(&self) -> bool {
        self.number == super::FRONT
    }

    pub fn others(&self) -> impl Iterator<Item = u16> + use<> {
        let own = self.number as u16;
        (0..self.count as u16).filter(move |reactor| *reactor != own)
    }

    pub fn say(&mut self, reactor: u16, post: Post) {
        self.unsaid[usize::from(reactor)].push_back(post);
        self.say_rest();
    }

    /// Says what others had no room for.
    pub fn say_rest(&mut self) {
        let Some(posts) = self.posts.get() else { return };
        for (unsaid, other) in self.unsaid.iter_mut().zip(posts) {
            while let Some(post) = unsaid.pop_front() {
                if let Err(Full(post)) = other.post(post) {
                    unsaid.push_front(post);
                    break;
                }
            }
        }
    }

    /// Something is still to be said.
    pub fn has_unsaid(&self) -> bool {
        self.unsaid.iter().any(|unsaid| !unsaid.is_empty())
    }
}
