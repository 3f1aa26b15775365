from draftree.cli import main

main()
